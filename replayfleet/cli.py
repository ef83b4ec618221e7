"""``replayfleet``: the first minutes with an installed package; and where programs are put together from their rooms.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.paths import FOLDER
from replayfleet.federation.service.command import run_command

if TYPE_CHECKING:
    from replayfleet.export.parameters import Model

_FOLDERS = ("docker", "monitoring", "systemd")
"""Below scripts/: what a fleet is set up with."""

_NEXT = """
next, on the aggregator's machine, take the first device in, which says what to copy where (host: the broker's name):
  aggregator enroll cam-1 --data-dir aggregator --host broker.example
then put your names into {folder}/systemd/aggregator.toml and {folder}/systemd/edge.toml, and, to try them here, the
folders that this made (aggregator/identity and aggregator/members/cam-1) as identity:
  aggregator serve --config {folder}/systemd/aggregator.toml --data-dir aggregator
  edge-client doctor --config {folder}/systemd/edge.toml
Every step, to running services: docs/deploy.md, whose scripts/ is {folder}/ here.
"""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="replayfleet")
def cli() -> None:
    """Cameras that keep learning: see a fleet at work, or set one up.

    The work itself is done by edge-client, aggregator, fleet-sim and model-export.
    """


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def demo(options: tuple[str, ...]) -> None:
    """Let three clients and an aggregator learn a stream, and write a report; --help lists the options."""
    sys.argv = ["replayfleet demo", *options]
    from replayfleet.scripts.demo.__main__ import main as run

    run()


@cli.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
def init(folder: Path) -> None:
    """Write what a fleet is set up with to DIR: settings, systemd units, Docker, alerts. The rest: `aggregator enroll`.

    Files that are there are left as they are.
    """
    import replayfleet.scripts

    home, target = Path(replayfleet.scripts.__file__).parent, folder
    said: list[str] = []
    try:
        for path in sorted(path for name in _FOLDERS for path in (home / name).iterdir() if path.is_file()):
            target = folder / path.parent.name / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                said.append(f"kept     {target}")
                continue
            write_atomic(target, path.read_bytes())
            said.append(f"written  {target}")
    except OSError as error:
        raise SettingsError(f"{error.filename or target} can't be written ({error.strerror})") from error
    click.echo("\n".join(said))
    click.echo(_NEXT.format(folder=shlex.quote(str(folder))), nl=False)


def main() -> None:
    """Run the command; every expected error is one line on stderr: exit code 2 for settings, 1 for the rest."""
    run_command(cli, "replayfleet")


def model_export() -> None:
    """Run ``model-export``, handing in what opens runs and data dirs, which the export itself doesn't know."""
    from replayfleet.export.cli import main as export

    def stored(path: Path, client: str | None, kind: str, class_: str | None) -> Model:
        from replayfleet.runs import stored_model

        return stored_model(path, client, kind, class_)

    run_command(export, "model-export", stored)
