"""How what is large is imported: PyTorch, and what its exporter needs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Look for no garbage meanwhile: an import makes next to none, and PyTorch's takes a seventh less of the CPU.

    Python looks through all that was imported so far whenever that has grown by a quarter.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
