"""The process that builds one engine: its job on standard input.

It yields to everybody else, says how far it is on standard output, and ends when its input does, so it never outlives
who started it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

from replayfleet.export.engines.cache import Workplace
from replayfleet.export.running.provider_options import BatchProfile
from replayfleet.federation.children import Parent

NICENESS = 19
"""The lowest: nobody waits for an engine, another runtime answers meanwhile."""


def main() -> None:
    """Build what the first line of standard input asks for."""
    parent = Parent()  # killed with it too: a library that builds may hold Python's lock, and its input's end go unread
    with contextlib.suppress(OSError):
        os.nice(NICENESS)

    def say(**fields: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            parent.say(fields)

    job = parent.hear(dict[str, Any])
    if job is None:
        return
    threading.Thread(target=_end_with_input, name="input", daemon=True).start()
    try:
        place = Workplace(Path(job["folder"]), Path(job["engine"]), Path(job["timing"]))
        model = Path(job["model"]).read_bytes()
        maker = _maker(job["maker"])
        maker.build(model, place, BatchProfile(**job["profile"]), lambda part, of: say(part=part, of=of))
    except Exception as error:  # root of the process: libraries share no exception class
        lines = str(error).strip().splitlines()
        say(error=f"{type(error).__name__}: {lines[0] if lines else ''}")
    else:
        say(done=True)


def _maker(path: str) -> Any:
    """Return an instance of the class that ``module:class`` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)()


def _end_with_input() -> None:
    while sys.stdin.buffer.read(1 << 10):
        pass
    os._exit(1)
