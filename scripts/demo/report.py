"""The report of a finished demo; ``python -m replayfleet.scripts.demo.report OUT`` writes it again."""

from __future__ import annotations

from pathlib import Path

import click

from replayfleet.federation.paths import ANY_PATH
from replayfleet.federation.service.command import run_command
from replayfleet.federation.streams.datasets import Dataset, load_dataset
from replayfleet.scripts.demo.facts import read_facts
from replayfleet.scripts.demo.page import page
from replayfleet.scripts.demo.samples import generated_pictures, real_pictures
from replayfleet.scripts.demo.sentences import summary
from replayfleet.scripts.launch.plan import FASHION_MNIST
from replayfleet.scripts.launch.report import Report, write_again


def write_report(out: Path, data: Dataset) -> Report:
    """Read the finished demo in ``out`` and write ``report.html`` there.

    Args:
        out: the demo's folder.
        data: for real images beside the generated ones.

    Raises:
        ReplayfleetError: The demo didn't finish; says what is missing.
    """
    facts = read_facts(out)
    generated = generated_pictures(out / "aggregator", facts.record.spec)
    text = page(facts, generated, real_pictures(data))
    path = out / "report.html"
    path.write_text(text, encoding="utf-8")
    return Report(path, summary(facts))


@click.command()
@click.argument("out", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--data-root", type=ANY_PATH, help="Folder that holds the data set.")
def report(out: Path, data_root: Path | None) -> None:
    """Write OUT/report.html of the demo that ran in OUT."""
    write_again(lambda: write_report(out, load_dataset(FASHION_MNIST, data_root=data_root)))


if __name__ == "__main__":
    run_command(report, "demo-report")
