"""``aggregator console``, which ``aggregator serve --console`` starts beside itself."""

from __future__ import annotations

import os
import signal

import click

from replayfleet.aggregator.console.settings import ConsoleSettings
from replayfleet.federation.children import die_with_parent
from replayfleet.federation.help_groups import GroupedCommand
from replayfleet.federation.service.command import run_command, with_settings

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


def main() -> None:
    """Run the command as a child of ``aggregator serve``."""
    die_with_parent(signal.SIGTERM)
    os.nice(_NICE)
    run_command(console, "aggregator console")
