"""What a process holds of a device's memory without using it."""

from __future__ import annotations

import contextlib
import ctypes
import gc

KEPT_BYTES = 32 << 20
"""As much as a C library takes for one piece of memory that it may keep."""
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment of a process that asks for pages of 2 MB: to be given a model's memory 4 KB at a time takes longer than
to fill it. Nothing changes where the system has none, or another C library."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_PR_SET_THP_DISABLE = 41  # prctl(2)


def keep_memory() -> None:
    """Keep up to ``KEPT_BYTES`` of what is freed for what comes next, until ``give_memory_back``.

    Else the C library gives back what a model of some MB took as soon as it is freed, and it is asked for anew, page by
    page, for every step between a message and the disk.
    """
    with contextlib.suppress(OSError, AttributeError):
        for what in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(what, KEPT_BYTES)


def give_memory_back() -> None:
    """Return what was freed to the system; the C library would keep it for later."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def no_more_huge_pages() -> None:
    """Take small pages from now on; what is given back then stays away, where the kernel would fill it up again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
