"""The command line around a demo: signals, and every expected error as one line."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import click

from replayfleet.federation.service.command import fail
from replayfleet.federation.service.logs import configure_logging
from replayfleet.scripts.launch.processes import ChildFailed

interrupted = threading.Event()
"""Set by Ctrl-C and SIGTERM; whoever waits for processes looks at it."""


def run_demo(command: click.Command, name: str) -> NoReturn:
    """Run a demo's command; every expected error is one line on stderr, exit code 2 for settings, 1 for the rest.

    Args:
        command: to run with this process's arguments.
        name: begins every line on stderr.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported for the report
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        code = command.main(standalone_mode=False)
    except ChildFailed as error:
        click.echo(f"{name}: {' '.join(str(error).split())}:", err=True)
        click.echo("\n".join(f"    {line}" for line in error.tail.splitlines()), err=True)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        click.echo(f"{name}: stopped; all its processes are ended", err=True)
        sys.exit(130)
    except Exception as error:
        fail(name, error)
    sys.exit(code if isinstance(code, int) else 0)


class Positive(click.FloatRange):
    """A number above 0: neither infinite nor NaN, which would be within any range."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not in the range x>0.", param, ctx)
        return found


PORT, POSITIVE = click.IntRange(1, 65535), Positive()


def log_to(path: Path) -> None:
    """Write this process's own log to a file, for standard output is for people."""
    configure_logging(stream=path.open("w", encoding="utf-8", buffering=1))


def this_command() -> list[str]:
    """Return this process's command line as somebody would type it again."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return ["python", "-m", f"replayfleet.scripts.{program.parent.name}", *sys.argv[1:]]
    return [*program.name.split(), *sys.argv[1:]]  # "replayfleet demo" are two words


def _interrupt(*_: object) -> None:
    """Note the signal and raise: while a process is being started, Python prints what is raised and goes on."""
    interrupted.set()
    raise KeyboardInterrupt
