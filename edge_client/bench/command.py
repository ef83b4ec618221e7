"""``edge-client bench`` on the command line; everything heavy is imported when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from replayfleet.federation.errors import SettingsError

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("model", type=_PATH, required=False)
@click.option("--parameters", type=_PATH, help="Of a MODEL that was exported with --split.")
@click.option("--data-dir", type=_PATH, help="Measure what the client with this data dir serves.")
@click.option("--batch", "batches", type=int, multiple=True, help="Batch size; repeatable.  [default: 1 and 64]")
@click.option("--threads", type=int, default=1, show_default=True, help="Of one inference.")
@click.option("--seconds", type=float, default=2.0, show_default=True, help="For each number.")
@click.option("--source", metavar="URI", help="Whose pictures are served.  [default: synthetic://street?rate=30]")
@click.option("--no-frames", is_flag=True, help="Don't serve pictures.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: seconds and bytes.")
def bench(*, source: str | None, no_frames: bool, as_json: bool, **options: Any) -> None:
    """Measure latency, memory and frames a second of every runtime that works here.

    MODEL is a file of model-export, ONNX or TorchScript; TorchScript is code, so give only your own. Without MODEL and
    --data-dir, an untrained model that comes along is measured.
    """
    from replayfleet.edge_client.bench.frames import DEFAULT_SOURCE
    from replayfleet.edge_client.bench.report import as_facts, head, line, tail
    from replayfleet.edge_client.bench.running import BenchSettings, Row, run_bench

    if source and no_frames:
        raise SettingsError("both --source and --no-frames are given; expected one of them")
    options["batches"] = options["batches"] or (1, 64)
    settings = BenchSettings(source="" if no_frames else source or DEFAULT_SOURCE, **options)

    def told(row: Row) -> None:
        if not as_json:
            click.echo(line(row))

    if not as_json:
        name = settings.model or settings.data_dir or "an untrained task model for 28 pixels"
        click.echo(head(str(name), settings.threads))
    found = run_bench(settings, told)
    click.echo(json.dumps(as_facts(found), indent=1) if as_json else "\n".join(tail(found)))
