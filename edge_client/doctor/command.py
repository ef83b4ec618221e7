"""The command line of ``edge-client doctor``; imports nothing else before it is used."""

from __future__ import annotations

import json
import shutil
import sys

import click

from replayfleet.edge_client.doctor.settings import DoctorSettings
from replayfleet.edge_client.settings import ClientSettings
from replayfleet.federation.help_groups import GroupedCommand
from replayfleet.federation.service.command import with_settings


@click.command(cls=GroupedCommand)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings(DoctorSettings, file="edge.toml", file_of=ClientSettings)
def doctor(settings: DoctorSettings, as_json: bool) -> int:
    """Look at this board, prove what it computes with, and say what to do about the rest.

    Exits 0 if nothing fails, 1 if something does, 2 if an option can't be used.
    """
    from replayfleet.edge_client.doctor.doctor import examine
    from replayfleet.edge_client.doctor.running import Check

    on_terminal = sys.stderr.isatty()

    def tell(check: Check) -> None:
        if on_terminal:
            click.echo(f"\r\033[Klooking at {check.name} ...", nl=False, err=True)

    report = examine(settings, tell)
    if on_terminal:
        click.echo("\r\033[K", nl=False, err=True)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1))
    else:
        click.echo("\n".join(report.lines(shutil.get_terminal_size((120, 24)).columns)))
    return report.exit_code
