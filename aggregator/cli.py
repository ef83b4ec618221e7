"""``aggregator``: serve a fleet, and look at a run.

Torch is imported when a run begins, so that ``--help`` and mistakes are answered at once.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.service.command import run_command
from replayfleet.federation.service.presets import STORES_DATA

_METHODS = (
    "pfedgrp, fedavg, fedgp, der-fedgp, ...: docs/methods and federation/service/variants.py. "
    f"Clients keep real samples with {', '.join(STORES_DATA)}.  [default: pfedgrp]"
)
_PATH = click.Path(path_type=Path)
_HELP = {"help_option_names": ["-h", "--help"]}


@click.group(context_settings=_HELP)
@click.version_option(package_name="replayfleet")
def cli() -> None:
    """Aggregate what a fleet of cameras learns, and give every camera its own model."""


@cli.command()
@click.option("--broker", metavar="URL", help="mqtts://host:port, or mqtt:// on this machine. Without: a private one.")
@click.option("--data-dir", type=_PATH, help="Everything the aggregator keeps; a restart continues from it. Required.")
@click.option("--clients", type=int, help="A round closes at once with uploads of this many clients. Required.")
@click.option("--rounds", type=int, help="End after this many rounds.  [default: serve for ever]")
@click.option("--min-clients", type=int, help="A round closes at its deadline with this many.  [default: 1]")
@click.option("--deadline-s", type=float, help="Seconds that a round stays open.  [default: 600]")
@click.option("--fleet", help="Fleet name, part of every topic.  [default: fleet]")
@click.option("--method", help=_METHODS)
@click.option(
    "--dataset",
    help="The task by its set: fashion-mnist, mnist, emnist-byclass, cifar-10, cifar-100, carla-crops.  "
    "[default: fashion-mnist]",
)
@click.option("--task", type=_PATH, help="The task from a TOML file, instead of --dataset.")
@click.option("--settings", help="Preset of the method: paper, small, demo, tiny.  [default: small]")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one method setting; repeatable.")
@click.option("--seed", type=int, help="What all randomness derives from.  [default: 0]")
@click.option("--config", type=_PATH, help="aggregator.toml; options on the command line win.")
@click.option("--tls-ca", type=_PATH, help="Certificate authority of the broker.  [default: the system's]")
@click.option("--tls-cert", type=_PATH, help="Client certificate.")
@click.option("--tls-key", type=_PATH, help="Its private key.")
@click.option("--password-file", type=_PATH, help="User on the first line, password on the second.")
@click.option("--insecure", is_flag=True, default=None, help="Allow plaintext to another machine.")
@click.option("--health-port", type=int, help="/healthz and /metrics on loopback; -1: off.  [default: 0, a free port]")
@click.option("--threads", type=int, help="Of one tensor operation; results depend on it.  [default: 2]")
@click.option("--json-logs", is_flag=True, default=None, help="Log JSON lines.")
def serve(config: Path | None, overrides: tuple[str, ...], **options: Any) -> None:
    """Run a fleet's aggregator; with --rounds it exits 0 after the last one."""
    from replayfleet.aggregator.settings import AggregatorSettings
    from replayfleet.federation.service.logs import configure_logging
    from replayfleet.federation.service.settings import read_settings, split_overrides
    from replayfleet.federation.service.torch_setup import let_idle_threads_sleep

    let_idle_threads_sleep()
    given: dict[str, Any] = dict(options)
    if overrides:
        given["set"] = split_overrides(overrides)
    settings = read_settings(AggregatorSettings, config, given)
    configure_logging(as_json=settings.json_logs)
    settings.task_spec()
    from replayfleet.aggregator.serve import serve as run

    if not run(settings) and settings.rounds is not None:
        raise ReplayfleetError("stopped before the last round; the same command goes on where it was")


@cli.command()
@click.option("--data-dir", type=_PATH, required=True, help="The data dir of `aggregator serve`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(data_dir: Path, as_json: bool) -> None:
    """Show the round, its uploads and every client's download, also while the aggregator runs."""
    from replayfleet.aggregator.operator.status import read_status

    found = read_status(data_dir)
    click.echo(json.dumps(dataclasses.asdict(found), indent=1) if as_json else "\n".join(found.lines()))


def main() -> None:
    """Run the command; every expected error is one line on stderr: exit code 2 for settings, 1 for the rest."""
    run_command(cli, "aggregator")
