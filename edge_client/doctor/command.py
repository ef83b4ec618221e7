"""The command line of ``edge-client doctor``; imports nothing else before it is used."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import click

_PATH = click.Path(path_type=Path)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--config", type=_PATH, help="The client's edge.toml; options on the command line win.")
@click.option("--device", help="As for start; auto: whatever fits this board.  [default: auto]")
@click.option("--require-provider", metavar="NAME", help="tensorrt, cuda or cpu: not having it is a failure.")
@click.option("--broker", metavar="URL", help="Try this broker: mqtts://host:port, or mqtt:// on this machine.")
@click.option("--client-id", help="This client's name in the fleet.  [default: the broker's user]")
@click.option("--fleet", help="Fleet name, part of every topic.  [default: fleet]")
@click.option("--source", metavar="URI", multiple=True, help="A camera as for start; repeatable.")
@click.option("--data-dir", type=_PATH, help="The client's: its disk is looked at.")
@click.option("--tls-ca", type=_PATH, help="Certificate authority of the broker.  [default: the system's]")
@click.option("--tls-cert", type=_PATH, help="Client certificate.")
@click.option("--tls-key", type=_PATH, help="Its private key.")
@click.option("--password-file", type=_PATH, help="User on the first line, password on the second.")
@click.option("--insecure", is_flag=True, default=None, help="Allow plaintext to another machine.")
@click.option("--ntp", metavar="HOST", help="Time server to compare clocks with.  [default: the broker's host]")
def doctor(as_json: bool, config: Path | None, **options: Any) -> int:
    """Look at this board, prove what it computes with, and say what to do about the rest.

    Exits 0 if nothing fails, 1 if something does, 2 if an option can't be used.
    """
    from replayfleet.edge_client.doctor.doctor import examine
    from replayfleet.edge_client.doctor.running import Check
    from replayfleet.edge_client.doctor.settings import read_doctor_settings

    options["source"] = options["source"] or None
    settings = read_doctor_settings(config, options)
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
