"""The demo's report: one HTML file without external resources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from replayfleet.federation.streams.datasets import Dataset
from replayfleet.scripts.report.facts import Facts, read_facts
from replayfleet.scripts.report.page import page
from replayfleet.scripts.report.samples import generated_pictures, real_pictures
from replayfleet.scripts.report.sentences import summary


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
