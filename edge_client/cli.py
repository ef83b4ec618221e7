"""``edge-client``: run one device of a fleet, and look at it.

Neither torch nor ONNX Runtime is imported before a client starts, so that ``--help`` and mistakes are answered at once.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from replayfleet.edge_client.bench.command import bench
from replayfleet.edge_client.doctor.command import doctor
from replayfleet.edge_client.settings import ClientSettings
from replayfleet.edge_client.studio_command import studio
from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.help_groups import HELP, Program
from replayfleet.federation.paths import ANY_PATH
from replayfleet.federation.service.command import run_command, say, with_settings


@click.group(cls=Program, context_settings=HELP)
@click.version_option(package_name="replayfleet")
def cli() -> None:
    """Serve a camera with a model that keeps learning."""


@cli.command()
@with_settings(ClientSettings, file="edge.toml")
def start(settings: ClientSettings) -> None:
    """Run one device. It ends, with exit code 0, when the run is finished and its last model served, or is stopped."""
    from replayfleet.federation.service.logs import configure_logging

    configure_logging(as_json=settings.json_logs)
    from replayfleet.edge_client.start import start as run

    if run(settings):
        say("edge-client", "the run is finished, and its last model was served")
    else:
        say("edge-client", "stopped before the run was finished; the same command goes on where it was")


@cli.command()
@click.option("--data-dir", type=ANY_PATH, required=True, help="The data dir of `edge-client start`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(data_dir: Path, as_json: bool) -> None:
    """Show what a client does, also while it runs; ends with 1 if it runs and has said nothing for half a minute."""
    from replayfleet.edge_client.operator.status import lines, read_status, stale

    found = read_status(data_dir)
    click.echo(json.dumps(found, indent=1) if as_json else "\n".join(lines(found)))
    if problem := stale(found):
        raise ReplayfleetError(problem)


cli.add_command(doctor)
cli.add_command(bench)
cli.add_command(studio)


def main() -> None:
    """Run the command; every expected error is one line on stderr: exit code 2 for settings, 1 for the rest."""
    run_command(cli, "edge-client")
