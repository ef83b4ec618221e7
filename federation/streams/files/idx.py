"""The idx format of MNIST and its relatives: a big-endian header, then bytes. Gzip-compressed or plain.

Header: two zero bytes, the type (8 = uint8), the number of axes, then one uint32 per axis
(LeCun et al., "The MNIST database of handwritten digits", section "File formats").
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError

_UINT8 = 8
_MAX_BYTES = 1 << 31
"""Larger headers are taken for damage before anything is allocated."""


def read_idx(path: Path, num_axes: int) -> NDArray[np.uint8]:
    """Return the uint8 array of ``num_axes`` axes in ``path``; a name ending in ``.gz`` is decompressed.

    Raises:
        SettingsError: The file can't be read, is no such idx file, or ends early or late.
    """
    try:
        with path.open("rb") as raw:
            stream = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
            return _parse(stream, path, num_axes)
    except (OSError, EOFError, zlib.error) as error:
        raise SettingsError(f"{path} is damaged or unreadable ({error}); fetch it again") from error


def _parse(stream: BinaryIO, path: Path, num_axes: int) -> NDArray[np.uint8]:
    expected_magic = (_UINT8 << 8) | num_axes
    header = stream.read(4 + 4 * num_axes)
    if len(header) < 4 + 4 * num_axes or int.from_bytes(header[:4], "big") != expected_magic:
        raise SettingsError(
            f"{path} is no idx file of {num_axes} axes: it begins with {header[:4].hex() or 'nothing'}, "
            f"expected {expected_magic:08x}; fetch it again"
        )
    shape = struct.unpack(f">{num_axes}I", header[4:])
    size_bytes = math.prod(shape)
    if size_bytes > _MAX_BYTES:
        raise SettingsError(f"{path} claims {size_bytes} bytes, more than any set this project knows; fetch it again")
    data = stream.read(size_bytes + 1)
    if len(data) != size_bytes:
        found = f"only {len(data)}" if len(data) < size_bytes else "more"
        raise SettingsError(
            f"{path} is damaged: its header promises {size_bytes} bytes, it has {found}; fetch it again"
        )
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)
