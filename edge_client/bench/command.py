"""``edge-client bench`` on the command line; everything heavy is imported when it runs."""

from __future__ import annotations

import json

import click

from replayfleet.edge_client.bench.settings import BenchSettings
from replayfleet.federation.help_groups import GroupedCommand
from replayfleet.federation.paths import ANY_PATH
from replayfleet.federation.service.command import with_settings


@click.command(cls=GroupedCommand)
@click.argument("model", type=ANY_PATH, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: seconds and bytes.")
@with_settings(BenchSettings)
def bench(settings: BenchSettings, as_json: bool) -> None:
    """Measure latency, memory and frames a second of every runtime that works here.

    MODEL is a file of model-export, ONNX or TorchScript; TorchScript is code, so give only your own. Without MODEL and
    --data-dir, an untrained model that comes along is measured.
    """
    from replayfleet.edge_client.bench.report import as_facts, head, line, tail
    from replayfleet.edge_client.bench.running import Row, run_bench

    begun = as_json

    def told(row: Row) -> None:
        nonlocal begun
        if not begun:  # not before: what can't be measured at all is one line, on stderr
            name = settings.model or settings.data_dir or "an untrained task model for 28 pixels"
            click.echo(head(str(name), settings.threads))
            begun = True
        if not as_json:
            click.echo(line(row))

    found = run_bench(settings, told)
    click.echo(json.dumps(as_facts(found), indent=1) if as_json else "\n".join(tail(found)))
