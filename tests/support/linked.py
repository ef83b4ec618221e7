"""Shared libraries that need others which aren't there: written byte by byte, so that no compiler is needed."""

from __future__ import annotations

import struct
from pathlib import Path


def linked_library(folder: Path, name: str, *needs: str) -> Path:
    """Write ``lib<name>.so``, an ELF file without code that needs ``lib<need>.so`` for every name in ``needs``."""
    path = folder / f"lib{name}.so"
    strings = b"\0" + b"".join(f"lib{need}.so".encode() + b"\0" for need in needs)
    offsets = [strings.index(f"lib{need}.so".encode()) for need in needs]
    dynamic_at = 64 + 3 * 56
    entries = [(1, offset) for offset in offsets]
    num_entries = len(entries) + 6
    table_at = dynamic_at + 16 * num_entries
    symbols_at = table_at + len(strings) + (-len(strings)) % 8
    hash_at = symbols_at + 24
    size = hash_at + 16
    entries += [(5, table_at), (10, len(strings)), (6, symbols_at), (11, 24), (4, hash_at), (0, 0)]
    machine = struct.unpack_from("<H", Path("/proc/self/exe").read_bytes()[:20], 18)[0]
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01" + bytes(9),
        *(3, machine, 1, 0, 64, 0, 0, 64, 56, 3, 64, 0, 0),
    )
    load = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 4096)
    dynamic = struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at, dynamic_at, 16 * num_entries, 16 * num_entries, 8)
    stack = struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16)  # glibc 2.41 refuses what says nothing of it
    body = b"".join(struct.pack("<QQ", *entry) for entry in entries) + strings
    body += bytes(symbols_at - table_at - len(strings)) + bytes(24) + struct.pack("<IIII", 1, 1, 0, 0)
    path.write_bytes(header + load + dynamic + stack + body)
    return path
