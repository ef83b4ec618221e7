"""Tables 6 to 9 as Markdown: the paper's figures beside ours, which need no run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replayfleet.federation.paths import RESULT
from replayfleet.federation.service.words import count_of
from replayfleet.federation.simulator.measures.costs import NotBuilt, Size, size_of, training_cost
from replayfleet.federation.simulator.measures.metrics import over_seeds
from replayfleet.federation.simulator.result import Result
from replayfleet.federation.simulator.tables.costs_paper import CostRow, CostTable, amount, cost_tables, size_table
from replayfleet.federation.simulator.tables.measured import measured
from replayfleet.federation.simulator.tables.plan import read_json
from replayfleet.federation.simulator.tables.wording import Footnotes, head

_NONE = "-"

_EXPERIMENTS = ("gradual", "circulating")


@dataclass(frozen=True, slots=True)
class Counted:
    """Updates of a generator, and where the number is from.

    Attributes:
        number: in all rounds, mean over clients and seeds.
        source: ``paper``, or what ran.
        at_paper_size: whether a cost by the paper's epochs may be reckoned from it.
    """

    number: float
    source: str
    at_paper_size: bool


def cost_report(number: str, out: Path | None) -> str:
    """Return one of Tables 6 to 9.

    Args:
        number: of the table.
        out: where runs are, for update counts and accuracies; None uses the paper's counts.

    Raises:
        SettingsError: A result below ``out`` can't be read.
    """
    return _sizes() if number == "6" else _training(cost_tables()[number], out)


def _sizes() -> str:
    table = size_table()
    names = [f"{kind}, {series}" for series in table.series for kind in ("FLOPs", "parameters")]
    lines = [f"# Table {table.number}: {table.title}", "", "Paper / ours.", "", *head(["model", *names])]
    footnotes = Footnotes(table.notes)
    for row in table.rows:
        texts: list[str] = []
        for place, series in enumerate(table.series):
            flops, parameters = row.published(place)
            if flops == _NONE:
                texts += [_NONE, _NONE]
                continue
            size = _size(row.model, series)
            if isinstance(size, Size):
                ours = (f"{size.flops / 1e6:.2f}M", f"{size.num_parameters / 1e3:.2f}K")
            else:
                ours = (size, size)
            texts += [f"{flops}{footnotes.marks(row.label, place)} / {ours[0]}", f"{parameters} / {ours[1]}"]
        lines.append(f"| {row.label} | {' | '.join(texts)} |")
    text = (
        "FLOPs are multiply-accumulates of one sample forward, counted as the paper counts them "
        "(`models/counting.py`). A GAN is its generator and critic together. Series: `mnist` 28 pixels, `cifar` 32, "
        "`imagenet` 64; ten classes."
    )
    return _joined([*lines, *footnotes.lines(), "", text])


def _training(table: CostTable, out: Path | None) -> str:
    names = ["updates", "share", "epochs", "FLOPs", "local cost", "global epochs", "global cost", "AA Expt. 1"]
    lines = [f"# Table {table.number}: {table.title}", "", "Paper / ours; costs paper / formula / ours.", ""]
    lines += head(["model", *names, "AA Expt. 2", "our updates are from"])
    footnotes, sizes = Footnotes(table.notes), size_table()
    for row in table.rows:
        on_flops = footnotes.marks_of(sizes.notes_on(row.model, table.series))
        texts = _row(row, table, out, on_flops=on_flops, on_costs=footnotes.marks(row.label, 0))
        lines.append(f"| {row.label} | {' | '.join(texts)} |")
    text = (
        "Cost per training sample = updates * share * epochs * FLOPs; B is 1e9. *Formula* puts the paper's own figures "
        "in; *ours* puts our modules' FLOPs in, and our updates, where runs below `--out` have the settings `paper` "
        "and the paper's rounds: others train for other epochs or rounds, so their updates are shown and no cost "
        "follows from them. A note on FLOPs holds for the costs that follow from them. Share: the part of a round's "
        "samples that one update sees."
    )
    return _joined([*lines, *footnotes.lines(), "", text])


def _row(row: CostRow, table: CostTable, out: Path | None, *, on_flops: str, on_costs: str) -> list[str]:
    counted = counted_updates(row, table, out)
    size = _size(row.model, table.series)

    def cost(epochs: int, published: str) -> str:
        if not epochs:
            return _NONE
        by_formula = training_cost(row.updates, epochs, amount(row.flops), share=row.share)
        if not isinstance(size, Size):
            return f"{published}{on_costs} / {_billions(by_formula)} / {size}"
        updates = counted.number if counted.at_paper_size else row.updates
        ours = _billions(training_cost(updates, epochs, size.flops, share=row.share))
        return f"{published}{on_costs} / {_billions(by_formula)} / {ours}"

    accuracies = [_accuracy(row.method, table.dataset, scenario, out) for scenario in _EXPERIMENTS]
    return [
        f"{row.updates:g} / {counted.number:g}",
        f"{row.share:g}",
        str(row.epochs or _NONE),
        f"{row.flops}{on_flops} / {f'{size.flops / 1e6:.2f}M' if isinstance(size, Size) else size}",
        cost(row.epochs, row.cost),
        str(row.global_epochs or _NONE),
        cost(row.global_epochs, row.global_cost),
        *(f"{published:.2f} / {ours}" for published, ours in zip(row.accuracy, accuracies, strict=True)),
        counted.source,
    ]


def counted_updates(row: CostRow, table: CostTable, out: Path | None) -> Counted:
    """Return a method's update count from its runs on a table's data set, Expt. 1 before Expt. 2, else the paper's.

    A generator that is trained in every round has as many updates as the run has rounds, the paper's too.
    """
    for scenario in _EXPERIMENTS:
        results = _results(row.method, table.dataset, scenario, out)
        if not results:
            continue
        if row.share < 1:
            updates = [result.summary["sub_generator_updates"] for result in results]
        else:
            updates = [float(len(result.rounds)) for result in results]
        sizes = f"{count_of(len(results[0].rounds), 'round')}, {count_of(len(results), 'seed')}"
        preset = results[0].run["preset"]
        is_whole = min(len(result.rounds) for result in results) >= max(one.updates for one in table.rows)
        at_paper_size = preset == "paper" and is_whole
        return Counted(over_seeds(updates).mean, f"{scenario}, settings {preset}, {sizes}", at_paper_size)
    return Counted(row.updates, "paper", at_paper_size=True)


def _accuracy(name: str, dataset: str, scenario: str, out: Path | None) -> str:
    values = [measured(result, None)["AA"] for result in _results(name, dataset, scenario, out)]
    return f"{over_seeds(values).mean:.2f}" if values else _NONE


def _results(name: str, dataset: str, scenario: str, out: Path | None) -> list[Result]:
    if out is None:
        return []
    paths = sorted((out / "runs" / name / scenario / dataset).glob(f"seed-*/{RESULT}"))
    return [read_json(path, Result) for path in paths]


def _size(model: str, series: str) -> Size | str:
    """Return a model's size, or why it has none."""
    try:
        return size_of(model, series)
    except NotBuilt as error:
        return str(error)


def _billions(flops: float) -> str:
    return f"{flops / 1e9:.5g}B" if flops else "0"


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"
