"""``python -m replayfleet.scripts.report runs/demo``: write the report of a finished demo again."""

from __future__ import annotations

from pathlib import Path

import click

from replayfleet.federation.errors import ReplayfleetError
from replayfleet.scripts.demo.plan import DATASET


@click.command()
@click.argument("out", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--data-root", type=click.Path(path_type=Path), help="Folder that holds the data set.")
def report(out: Path, data_root: Path | None) -> None:
    """Write OUT/report.html of the demo that ran in OUT."""
    from replayfleet.federation.streams.datasets import load_dataset
    from replayfleet.scripts.report import write_report

    try:
        written = write_report(out, load_dataset(DATASET, data_root=data_root))
    except ReplayfleetError as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n".join([*written.summary, str(written.path)]))


if __name__ == "__main__":
    report()
