"""What a process holds of a device's memory without using it (glibc; elsewhere the calls do nothing)."""

from __future__ import annotations

import contextlib
import ctypes
import gc

KEPT_BYTES = 16 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""


def keep_memory(size_bytes: int = KEPT_BYTES) -> None:
    """Keep so many freed bytes for later: a round takes models in hand again and again, each new page of which costs.

    ``give_memory_back`` returns these too.
    """
    with contextlib.suppress(OSError, AttributeError):
        for which in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(which, size_bytes)


def give_memory_back() -> None:
    """Return what was freed to the system; the C library would keep it for later."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
