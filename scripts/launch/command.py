"""The command line around a demo: signals, and every expected error as one line."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

import click

from replayfleet.federation.errors import ReplayfleetError, SettingsError
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
        _fail(name, f"{error}:", 1, error.tail)
    except SettingsError as error:
        _fail(name, str(error), 2)
    except ReplayfleetError as error:
        _fail(name, str(error), 1)
    except click.ClickException as error:
        _fail(name, f"{error.format_message()} (--help lists all options)", 2)
    except (click.Abort, KeyboardInterrupt):
        _fail(name, "stopped; all its processes are ended", 130)
    sys.exit(code if isinstance(code, int) else 0)


def log_to(path: Path) -> None:
    """Write this process's own log to a file, for standard output is for people."""
    configure_logging(stream=path.open("w", encoding="utf-8", buffering=1))


def this_command() -> list[str]:
    """Return this process's command line as somebody would type it again."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return ["python", "-m", f"replayfleet.scripts.{program.parent.name}", *sys.argv[1:]]
    return [program.name, *sys.argv[1:]]


def _interrupt(*_: object) -> None:
    """Note the signal and raise: while a process is being started, Python prints what is raised and goes on."""
    interrupted.set()
    raise KeyboardInterrupt


def _fail(name: str, message: str, code: int, more: str = "") -> NoReturn:
    click.echo(f"{name}: {' '.join(message.split())}", err=True)
    if more:
        click.echo("\n".join(f"    {line}" for line in more.splitlines()), err=True)
    sys.exit(code)
