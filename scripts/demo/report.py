"""The report of a finished demo; ``python -m replayfleet.scripts.demo.report OUT`` writes it again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.streams.datasets import Dataset, load_dataset
from replayfleet.scripts.demo.facts import Facts, read_facts
from replayfleet.scripts.demo.page import page
from replayfleet.scripts.demo.samples import generated_pictures, real_pictures
from replayfleet.scripts.demo.sentences import summary
from replayfleet.scripts.launch.plan import FASHION_MNIST


@dataclass(frozen=True, slots=True)
class Report:
    """A written report.

    Attributes:
        path: the HTML file.
        facts: its numbers.
        summary: the run in a few lines, for a terminal.
    """

    path: Path
    facts: Facts
    summary: list[str]


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
    return Report(path, facts, summary(facts))


@click.command()
@click.argument("out", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--data-root", type=click.Path(path_type=Path), help="Folder that holds the data set.")
def report(out: Path, data_root: Path | None) -> None:
    """Write OUT/report.html of the demo that ran in OUT."""
    try:
        written = write_report(out, load_dataset(FASHION_MNIST, data_root=data_root))
    except ReplayfleetError as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n".join([*written.summary, str(written.path)]))


if __name__ == "__main__":
    report()
