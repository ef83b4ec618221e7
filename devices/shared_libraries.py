"""Which shared libraries a shared library lacks on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import re
import struct
from pathlib import Path

_NEEDED, _STRTAB, _STRSZ = 1, 5, 10
"""Tags of entries in ELF's dynamic section (System V ABI, chapter 5)."""
_LOAD, _DYNAMIC = 1, 2
"""Types of program headers."""
_LOADER_ERROR = re.compile(r"(?P<name>[\w.+-]+\.so[\w.]*): cannot open shared object file")


def missing_in(text: str) -> str:
    """Return the library that a message of the dynamic loader complains about; empty if it is no such message."""
    match = _LOADER_ERROR.search(text)
    return match["name"] if match else ""


def missing_libraries(path: Path) -> tuple[str, ...]:
    """Return what keeps ``path`` from being loaded, the loader's own complaint first; empty if that isn't a library.

    Loads ``path`` and what it needs into this process, where they stay.
    """
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        first = missing_in(str(error))
    else:
        return ()
    if not first:
        return ()
    needed: tuple[str, ...] = ()
    with contextlib.suppress(OSError, struct.error, UnicodeDecodeError):
        needed = needed_libraries(path)
    return tuple(dict.fromkeys((first, *(name for name in needed if is_missing(name)))))


def needed_libraries(path: Path) -> tuple[str, ...]:
    """Return the names in the dynamic section of a 64-bit little-endian ELF file; none for anything else."""
    with path.open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01" or len(header) < 64:
            return ()
        first, size, count = *struct.unpack_from("<Q", header, 32), *struct.unpack_from("<HH", header, 54)
        file.seek(first)
        segments = [struct.unpack_from("<IIQQQQ", file.read(size)) for _ in range(count)]
        dynamic = next((segment for segment in segments if segment[0] == _DYNAMIC), None)
        if dynamic is None:
            return ()
        file.seek(dynamic[2])
        entries = list(struct.iter_unpack("<QQ", file.read(dynamic[5] // 16 * 16)))
        table = dict(entries)
        for kind, _, offset, address, _, length in segments:
            if kind == _LOAD and address <= table.get(_STRTAB, 0) < address + length:
                file.seek(table[_STRTAB] - address + offset)
                names = file.read(table.get(_STRSZ, 0))
                return tuple(names[at:].split(b"\0", 1)[0].decode() for tag, at in entries if tag == _NEEDED)
    return ()


def is_missing(name: str) -> bool:
    """Whether the loader doesn't find a library of that name, or can't load it; else it is loaded now."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return True
    return False
