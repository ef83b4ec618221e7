"""``aggregator console``, which ``aggregator serve --console`` starts beside itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replayfleet.aggregator.console.settings import ConsoleSettings
from replayfleet.federation.help_groups import GroupedCommand
from replayfleet.federation.paths import ANY_PATH
from replayfleet.federation.service.command import run_command, with_settings

if TYPE_CHECKING:
    from replayfleet.federation.service.web.access import Role

_NICE = 10
"""Beside an aggregator, which comes first where cores are few."""


@click.command(cls=GroupedCommand)
@with_settings(ConsoleSettings)
def console(settings: ConsoleSettings) -> None:
    """Show a fleet in the browser, also while its aggregator runs; `aggregator serve --console` does it beside it."""
    from replayfleet.federation.service.logs import configure_logging

    configure_logging(as_json=settings.json_logs)
    from replayfleet.aggregator.console.server import run

    run(settings)


@click.command(cls=GroupedCommand)
@click.argument("name")
@click.option("--tokens", type=ANY_PATH, required=True, help="The file of `--console-tokens`; made if it isn't there.")
@click.option(
    "--role", type=click.Choice(["viewer", "operator"]), default="viewer", help="What NAME may do.  [default: viewer]"
)
@click.option("--remove", is_flag=True, help="Take the token of NAME away.")
def token(name: str, tokens: Path, role: Role, remove: bool) -> None:
    """Make a token with which NAME may use the console, and print it once; a former one of NAME counts no more."""
    from replayfleet.federation.service.web.access import add_token, remove_token

    if remove:
        remove_token(tokens, name)
        click.echo(f"{name} has no token any more")
    else:
        click.echo(add_token(tokens, name, role))


def main() -> None:
    """Run the command as a child of ``aggregator serve``."""
    os.nice(_NICE)
    run_command(console, "aggregator console")
