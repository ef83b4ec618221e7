"""How a service's command line ends: every expected error is one line on stderr and an exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from replayfleet.federation.errors import ReplayfleetError, SettingsError


def run_command(command: click.Command, name: str) -> NoReturn:
    """Run ``command`` and exit: 2 for what the operator wrote, 1 for the rest, 130 for Ctrl-C.

    Args:
        command: the outermost command or group.
        name: the program's name, which begins every error line.
    """
    try:
        code = command.main(standalone_mode=False)
    except SettingsError as error:
        _fail(name, str(error), 2)
    except ReplayfleetError as error:
        _fail(name, str(error), 1)
    except ModuleNotFoundError as error:
        _fail(name, f"{error}; install replayfleet[cpu] or replayfleet[cuda], on a Jetson the vendor's build", 1)
    except click.ClickException as error:
        _fail(name, f"{error.format_message()} ({_path(name, error)} --help lists all options)", 2)
    except click.Abort:
        _fail(name, "stopped", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _path(name: str, error: click.ClickException) -> str:
    """Return the program and the command that couldn't be understood, as they were typed."""
    words: list[str] = []
    context = getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        words.insert(0, str(context.info_name))
        context = context.parent
    return " ".join((name, *words))


def _fail(name: str, message: str, code: int) -> NoReturn:
    click.echo(f"{name}: {' '.join(message.split())}", err=True)
    sys.exit(code)
