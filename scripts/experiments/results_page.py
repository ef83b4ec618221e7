r"""docs/results.md and its charts, from raw results alone: no number of that page is typed by hand.

    make reproduce ARGS="--minutes 0 --pack results/trained/runs.tar.xz"
    python -m replayfleet.scripts.experiments.results_page

A test holds that the page is what the committed raw results give.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.simulator.charts import Curve, accuracy_chart
from replayfleet.federation.simulator.measures.metrics import LATE_ROUNDS
from replayfleet.federation.simulator.records import ClientRecord, RoundRecord
from replayfleet.federation.simulator.result import Part
from replayfleet.federation.simulator.tables.paper import EXPERIMENTS
from replayfleet.federation.simulator.tables.report import machine
from replayfleet.scripts.experiments.raw_results import Raw, unpacked
from replayfleet.scripts.experiments.reproduce import BLOCKS
from replayfleet.scripts.experiments.search import lines_of

RAW = Path("results/trained/runs.tar.xz")
TRIALS = Path("results/trained/trials.jsonl")
PAGE = Path("docs/results.md")
PERTURBED = "+perturbed"
_FEWER = "-int8"
OLD_ROUNDS = 3
"""A class is "met long ago" if a client's last round with it lies at least so many rounds back."""

_HEAD = """\
Every number of this page was computed from [raw results](../results/trained/runs.tar.xz) by `python -m
replayfleet.scripts.experiments.results_page`. `make reproduce` runs what is left of the experiments behind it, in the
order of what they tell, and says how long that takes; `ARGS=--dry-run` only says it. Earlier runs, at a `small` that
didn't train its models to the end: [experiments](experiments.md).

AA and AR: mean accuracy and mean regret against Centralized over all rounds, in percent ([metrics](metrics.md));
AA{late} and AR{late}: over the last {late}. Unfinished runs count with the rounds that they made, and say how many.
Just met and long ago: accuracy on classes that a client met in the round, and on those that it met last at least {old}
rounds ago. CPU time is that of training and aggregation, without evaluation; it and the samples are those of seeds that
ran without a GPU. Runs were made on several machines, on which the same work took up to four times the CPU time:
compare the samples. Of everything: bytes that travelled, of those that sending all its models and sub-generators in
every round as float32 would take.
"""

_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)
"""Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; 2 beyond."""


@dataclass(frozen=True, slots=True)
class Found:
    """A run of the raw results.

    Attributes:
        block: whose.
        name: of its method, with what it changes.
        scenario, dataset, seed: of its stream.
        raw: what it gave.
    """

    block: str
    name: str
    scenario: str
    dataset: str
    seed: int
    raw: Raw


def found_in(runs: Mapping[str, Raw]) -> list[Found]:
    """Return the runs of a packed file, in the order of their folders."""
    found = []
    for folder, raw in runs.items():
        block, _, name, scenario, dataset, seed = folder.split("/")
        found.append(Found(block, name, scenario, dataset, int(seed.partition("-")[2]), raw))
    return found


def page_of(runs: Sequence[Found], trials: Sequence[Mapping[str, Any]] = ()) -> tuple[str, dict[str, bytes]]:
    """Return the page, and its charts by file name."""
    sections, charts = [], {}
    for section, chart in (*_claims(runs), _trained(runs), _constant(runs), (_searched(trials), {})):
        sections += [*section, ""]
        charts.update(chart)
    head = ["# Results", "", *_HEAD.format(late=LATE_ROUNDS, old=OLD_ROUNDS).splitlines(), ""]
    text = "\n".join([*head, *sections, *_commands(runs)])
    return text.rstrip() + "\n", charts


def _trained(runs: Sequence[Found]) -> tuple[list[str], dict[str, bytes]]:
    pairs = _beside(runs, "-epochs")
    return _compared(
        "Is Centralized trained?",
        "Asked: twice as many epochs change its accuracy by less than a point in every round.",
        pairs,
        ("8 epochs", "16 epochs"),
        "results-epochs",
    )


def _constant(runs: Sequence[Found]) -> tuple[list[str], dict[str, bytes]]:
    pairs = _beside(runs, "-full")
    return _compared(
        "Centralized on a constant number of samples",
        "`small` trains it on 800 of all that a client ever met, drawn anew in every round. Beside it: on all of them.",
        pairs,
        ("800 samples a round", "all samples"),
        "results-constant",
    )


def _searched(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what as many trials gave each method: those that one has more of than another don't count."""
    lines = ["## As many trials for every method", ""]
    by_method: dict[str, dict[int, Mapping[str, Any]]] = {}
    for trial in trials:
        by_method.setdefault(trial["method"], {})[trial["trial"]] = trial
    each = min((len(own) for own in by_method.values()), default=0)
    if each < 2:
        begun = "Begun, with [too few trials](../results/trained/trials.jsonl) yet." if trials else "Not run yet."
        return [*lines, begun]
    lines += [
        f"{each} trials of each method on a stream that no table uses, of training images alone: trial 0 is its row as",
        f"tables have it, the others draw settings. AA{LATE_ROUNDS} on it; one seed: of two a point apart neither is",
        "better. [Every trial](../results/trained/trials.jsonl), also those beyond.",
        "",
        _row(("method", "as in tables", "best", "worst", "settings of the best", "CPU min of all")),
        _row(("---", "--:", "--:", "--:", "---", "--:")),
    ]
    for method, own in by_method.items():
        equal = [own[number] for number in sorted(own)[:each]]
        best, worst = max(equal, key=lambda one: one["score"]), min(equal, key=lambda one: one["score"])
        settings = ", ".join(f"`{name}={text}`" for name, text in best["settings"].items()) or "those of the tables"
        scores = (f"{100 * one['score']:.1f}" for one in (equal[0], best, worst))
        minutes = sum(one["process_cpu_s"] for one in equal) / 60
        lines.append(_row((f"`{method}`", *scores, settings, f"{minutes:.0f}")))
    held = "".join(f" --set {word}" for word in trials[0]["fixed"])
    command = f"python -m replayfleet.scripts.experiments.search {' '.join(by_method)}{held} --trials {each}"
    return [*lines, "", "```sh", f"{command} --out runs/search", "```"]


def _beside(runs: Sequence[Found], suffix: str) -> list[tuple[Found, Found]]:
    """Return Centralized's runs of a block beside those of the same block with a suffix."""
    plain = {(r.block, r.scenario, r.dataset, r.seed): r for r in runs if r.name == "centralized"}
    return [
        (plain[key], other)
        for other in plain.values()
        if other.block.endswith(suffix)
        and (key := (other.block.removesuffix(suffix), other.scenario, other.dataset, other.seed)) in plain
    ]


def _compared(
    title: str, asked: str, pairs: Sequence[tuple[Found, Found]], names: tuple[str, str], chart: str
) -> tuple[list[str], dict[str, bytes]]:
    lines, charts = [f"## {title}", "", asked, ""], {}
    if not pairs:
        return [*lines, "Not run yet."], {}
    places = dict.fromkeys((left.block, left.scenario, left.dataset) for left, _ in pairs)
    for place in places:
        same = [pair for pair in pairs if (pair[0].block, pair[0].scenario, pair[0].dataset) == place]
        by_seed = [[[100 * value for value in found.raw.curve] for found in pair] for pair in same]
        rounds = range(min(len(curve) for pair in by_seed for curve in pair))
        curves = [[_mean(pair[side][index] for pair in by_seed) for index in rounds] for side in (0, 1)]
        changes = [curves[1][index] - curves[0][index] for index in rounds]
        first, seeds = same[0][0], _seeds([left.seed for left, _ in same])
        alone = [max(abs(right[index] - left[index]) for index in rounds) for left, right in by_seed]
        each = f" (of each seed: {', '.join(f'{value:.1f}' for value in alone)})" if len(alone) > 1 else ""
        lines += [
            f"{_where(first)}, {seeds}, {_size(first.raw)}, {names[0]} and {names[1]}:",
            "",
            _row(["round", *map(str, rounds), "mean"]),
            _row(["---", *["--:"] * (len(rounds) + 1)]),
            *(
                _row([name, *(f"{value:.1f}" for value in curve), f"{_mean(curve):.1f}"])
                for name, curve in zip(names, curves, strict=True)
            ),
            _row(["change", *(f"{value:+.1f}" for value in changes), f"{_mean(changes):+.1f}"]),
            "",
            f"Largest change: {max(map(abs, changes)):.1f} points{each}; a point or more in "
            f"{sum(abs(change) >= 1 for change in changes)} of {len(changes)} rounds. "
            f"Cost: {_processor_seconds(same)}.",
            "",
        ]
        file = f"{chart}-{first.block}-{first.scenario}.png"
        charts[file] = accuracy_chart(
            [Curve(name, [value / 100 for value in curve]) for name, curve in zip(names, curves, strict=True)],
            title=f"Centralized, {_where(first)}, {seeds}",
        )
        lines += [f"![{title}]({file})", ""]
    return lines, charts


def _claims(runs: Sequence[Found]) -> list[tuple[list[str], dict[str, bytes]]]:
    claims = [found for found in runs if not found.block.endswith(("-epochs", "-full"))]
    claims.sort(key=lambda found: not found.block.startswith("small"))  # what README quotes comes first
    places = dict.fromkeys((found.block, found.scenario, found.dataset) for found in claims)
    return [
        _claim(
            place,
            [r for r in runs if (r.block, r.scenario, r.dataset) == place],
            _upper(place, runs),
            [r for r in runs if place[0].endswith(_FEWER) and (r.block + _FEWER, r.scenario, r.dataset) == place],
        )
        for place in places
    ]


def _upper(place: tuple[str, str, str], runs: Sequence[Found]) -> dict[int, Raw]:
    """Return Centralized's runs by seed: a block's own, or, of ``pilot-gaussian``, those of ``pilot``."""
    near = [r for r in runs if (r.name, r.scenario, r.dataset) == ("centralized", *place[1:])]
    return {r.seed: r.raw for block in (place[0].partition("-")[0], place[0]) for r in near if r.block == block}


def _claim(
    place: tuple[str, str, str], runs: Sequence[Found], upper: Mapping[int, Raw], lossless: Sequence[Found] = ()
) -> tuple[list[str], dict[str, bytes]]:
    shows = {block.name: f"{block.shows[0].upper()}{block.shows[1:]}. " for block in BLOCKS}.get(place[0], "")
    lines = [f"## {place[0]}: {_where(runs[0])}", "", f"{shows}{_size(runs[0].raw)}.", ""]
    columns = ["AA", "AR", f"AA{LATE_ROUNDS}", f"AR{LATE_ROUNDS}", "AA among classes met", "just met / long ago"]
    costs = ["CPU min", "of it task model / sub-generators / aggregation", "samples x epochs, millions"]
    costs += ["MB up", "MB down", "of everything"]
    lines += [_row(["method", *columns, "seeds", "rounds", *costs]), _row(["---", *["--:"] * 14])]
    for name in dict.fromkeys(found.name for found in runs):
        same = [found for found in runs if found.name == name]
        lines.append(_row([_name(name), *_numbers(same, upper)]))
    lines += ["", *_floors(runs), *_ahead(runs), *_of_fewer_bytes(runs, lossless)]
    curves: dict[str, dict[int, list[float]]] = {}
    for found in runs:
        if PERTURBED not in found.name:
            curves.setdefault(found.name, {})[found.seed] = found.raw.curve
    shared = sorted(set(curves.get("centralized", {})).intersection(*curves.values()))
    if not shared:
        return lines[:-1], {}  # beside a block that has a chart
    file = f"results-{'-'.join(place)}.png"
    means = {name: zip(*(by_seed[seed] for seed in shared), strict=False) for name, by_seed in curves.items()}
    chart = accuracy_chart(
        [Curve(name, [_mean(values) for values in rounds]) for name, rounds in means.items()],
        title=f"{place[0]}: {_where(runs[0])}, {_seeds(shared)}",
    )
    return [*lines, f"![accuracy]({file})"], {file: chart}


def _numbers(same: Sequence[Found], upper: Mapping[int, Raw]) -> list[str]:
    rounds = sorted({len(found.raw.rounds) for found in same})
    raws = [found.raw for found in same]
    beside = [(found.raw, upper[found.seed]) for found in same if found.seed in upper]
    finished = all(raw.finished for raw in raws)
    late = [_mean(raw.curve[-LATE_ROUNDS:]) for raw in raws] if finished else []
    regrets = [_regret(raw, best) for raw, best in beside]
    late_regrets = [_regret(raw, best, late=True) for raw, best in beside if raw.finished and best.finished]
    among = [value for raw in raws if (value := _among_seen(raw)) is not None]
    gaps = [gap for raw in raws if (gap := _recency(raw)) is not None]
    return [
        _percent([_mean(raw.curve) for raw in raws]),
        _percent(regrets),
        _percent(late),
        _percent(late_regrets),
        _percent(among),
        "-" if not gaps else f"{100 * _mean(g[0] for g in gaps):.0f} / {100 * _mean(g[1] for g in gaps):.0f}",
        str(len(same)),
        "-".join(map(str, rounds)),
        *_costs(raws),
    ]


def _costs(raws: Sequence[Raw]) -> list[str]:
    """Return what runs took; minutes and steps are those of a processor: clients in step, on a GPU, aren't counted."""
    bare = [raw for raw in raws if not any("gpu" in hardware for hardware, _, _ in _makers(raw))]
    return [*(_work(bare) if bare else ["-"] * 3), *_traffic(raws)]


def _work(raws: Sequence[Raw]) -> list[str]:
    everyone = [client for raw in raws for record in raw.rounds for client in record.clients.values()]
    share = 1 / len(raws)

    def minutes(part: str) -> float:
        return share * sum(client.cpu_s.get(part, 0.0) for client in everyone) / 60

    aggregation = share * sum(record.aggregate_cpu_s for raw in raws for record in raw.rounds) / 60
    total = sum(minutes(part) for part in {part for client in everyone for part in client.cpu_s}) + aggregation
    steps = share * sum(sum(client.sample_steps.values()) for client in everyone) / 1e6
    if not steps:  # a method that doesn't part its training, as FedCIL's network is both
        return [f"{total:.1f}", f"- / - / {aggregation:.1f}", "-"]
    parts = f"{minutes('task model'):.1f} / {minutes('sub-generators'):.1f} / {aggregation:.1f}"
    return [f"{total:.1f}", parts, f"{steps:.2f}"]


def _traffic(raws: Sequence[Raw]) -> list[str]:
    everyone = [client for raw in raws for record in raw.rounds for client in record.clients.values()]
    share = 1 / len(raws)
    up, down = (share * sum(getattr(client, f"bytes_{way}") for client in everyone) / 1e6 for way in ("up", "down"))
    whole = share * sum(client.bytes_up_everything + client.bytes_down_everything for client in everyone) / 1e6
    return [f"{up:.1f}", f"{down:.1f}", f"{100 * (up + down) / whole:.1f} %"]


def _floors(runs: Sequence[Found]) -> list[str]:
    """Say by how much runs differ whose initial weights differ by a ten-millionth."""
    plain = {(found.name, found.seed): found.raw for found in runs}
    lines = []
    for found in runs:
        twin = plain.get((found.name.removesuffix(PERTURBED), found.seed))
        if PERTURBED in found.name and twin is not None:
            num = min(len(twin.rounds), len(found.raw.rounds))
            apart = [100 * abs(a - b) for a, b in zip(twin.curve[:num], found.raw.curve[:num], strict=True)]
            mean = 100 * abs(_mean(twin.curve[:num]) - _mean(found.raw.curve[:num]))
            lines.append(
                f"- Noise floor of `{found.name.removesuffix(PERTURBED)}`, seed {found.seed}, {num} rounds: "
                f"{mean:.2f} points of AA, {_mean(apart):.2f} in a round, {max(apart):.2f} at most."
            )
    return [*lines, ""] if lines else []


def _ahead(runs: Sequence[Found]) -> list[str]:
    """Say by how much ours is ahead of pFedGRP, and that of each other method, seed by seed."""
    by_name: dict[str, dict[int, Raw]] = {}
    for found in runs:
        if PERTURBED not in found.name and found.name != "centralized":
            by_name.setdefault(found.name, {})[found.seed] = found.raw
    others = [name for name in by_name if not name.startswith("pfedgrp")]
    pairs = [("pfedgrp", "pfedgrp-plus"), *((name, "pfedgrp") for name in others)]
    lines = [
        _paired(by_name.get(theirs, {}), by_name.get(ours, {}), f"`{ours}` less `{theirs}`") for theirs, ours in pairs
    ]
    return [*filter(None, lines), ""] if any(lines) else []


def _paired(their_runs: Mapping[int, Raw], our_runs: Mapping[int, Raw], what: str) -> str:
    """Say how much less regret ours has over the last rounds; nothing where no seed has both.

    A seed counts once: its clients share an initialisation, an aggregation and most test images.
    """
    seeds = sorted(their_runs.keys() & our_runs.keys())
    if not seeds:
        return ""
    num = min(len(runs[seed].rounds) for runs in (their_runs, our_runs) for seed in seeds)
    late = range(max(0, num - LATE_ROUNDS), num)
    differences = []
    for seed in seeds:
        theirs, ours = their_runs[seed].rounds, our_runs[seed].rounds
        differences.append(
            100
            * _mean(
                ours[t].clients[client].accuracy - theirs[t].clients[client].accuracy
                for t in late
                for client in sorted(ours[0].clients)
            )
        )
    each = ", ".join(f"{difference:+.2f}" for difference in differences)
    return (
        f"- {what}, rounds {late[0]} to {late[-1]}: {_mean(differences):+.2f} points of accuracy, as much less "
        f"regret; by seed {each}{_interval(differences)}."
    )


def _of_fewer_bytes(runs: Sequence[Found], lossless: Sequence[Found]) -> list[str]:
    """Say what accuracy fewer bytes cost over whole runs, and how far apart seeds are."""
    whole = {(found.name, found.seed): 100 * _mean(found.raw.curve) for found in lossless}
    lines = []
    for name in dict.fromkeys(found.name for found in runs):
        pairs = [
            (100 * _mean(r.raw.curve), whole[name, r.seed])
            for r in runs
            if (r.name, r.seed) in whole and r.name == name
        ]
        changes = [fewer - plain for fewer, plain in pairs]
        if len(pairs) > 1:
            each = ", ".join(f"{change:+.2f}" for change in changes)
            lines.append(
                f"- `{name}`, AA with fewer bytes less AA without: {each}, on average {_mean(changes):+.2f} points; AA "
                f"of the lossless runs differs by {statistics.stdev(plain for _, plain in pairs):.2f} between seeds "
                "(standard deviation)."
            )
    return [*lines, ""] if lines else []


def _interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ", too few seeds for an interval"
    freedom = len(values) - 1
    quantile = _T_95[freedom - 1] if freedom <= len(_T_95) else 1.96 + 2.5 / freedom  # which is off by less than 0.01
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return f", 95 % interval {_mean(values) - half:+.2f} to {_mean(values) + half:+.2f}"


def _regret(raw: Raw, best: Raw, *, late: bool = False) -> float:
    num = min(len(raw.rounds), len(best.rounds))
    first = num - LATE_ROUNDS if late else 0
    return _mean(best.curve[first:num]) - _mean(raw.curve[first:num])


def _among_seen(raw: Raw) -> float | None:
    """AA if each client named only classes that it has met; None where that wasn't measured."""
    values = []
    for record in raw.rounds:
        clients = list(record.clients.values())
        if any(client.accuracy_among_seen is None for client in clients):
            return None
        total = sum(client.num_seen for client in clients)
        values.append(sum(client.num_seen * (client.accuracy_among_seen or 0.0) for client in clients) / total)
    return _mean(values)


def _recency(raw: Raw) -> tuple[float, float] | None:
    """Accuracy on classes that a client met in a round, and on those that it met last at least ``OLD_ROUNDS`` ago."""
    just, old = [], []
    last: dict[tuple[str, int], int] = {}
    for record in raw.rounds:
        for name, client in record.clients.items():
            last.update(((name, class_id), record.round) for class_id in client.classes)
            for class_id, value in client.class_accuracy.items():
                since = record.round - last[name, class_id]
                if since == 0:
                    just.append(value)
                elif since >= OLD_ROUNDS:
                    old.append(value)
    return (_mean(just), _mean(old)) if just and old else None


def _commands(runs: Sequence[Found]) -> list[str]:
    lines = [
        "## Commands, machines and versions",
        "",
        "Options that only say how long or how many at a time are left out.",
        "",
    ]
    lines += ["```sh", *dict.fromkeys(found.raw.spoken_command() for found in runs), "```", ""]
    makers = [part for found in runs for part in _makers(found.raw)]
    machines = sorted({machine(hardware) for hardware, _, _ in makers})
    versions = sorted({", ".join(f"{key} {value}" for key, value in sorted(own.items())) for _, own, _ in makers})
    commits = sorted({commit or "no checkout" for _, _, commit in makers})
    return [*lines, *(f"- {'; '.join(texts)}" for texts in (machines, versions, commits))] if runs else []


def _makers(raw: Raw) -> list[tuple[Mapping[str, Any], Mapping[str, str], str]]:
    makers: Sequence[Raw | Part] = raw.parts or [raw]
    return [(maker.hardware, maker.versions, maker.commit) for maker in makers]


def _where(found: Found) -> str:
    return f"{EXPERIMENTS.get(found.scenario, '')} ({found.scenario}), {found.dataset}".lstrip()


def _size(raw: Raw) -> str:
    stream, settings = raw.run["stream"], raw.run["settings"]
    text = f"{stream['num_clients']} clients, {stream['num_rounds']} rounds, settings `{raw.run['preset']}`"
    return text + (", task models in bfloat16" if settings.get("precision") == "bfloat16" else "")


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of seeds {', '.join(map(str, seeds))}"


def _processor_seconds(pairs: Sequence[tuple[Found, Found]]) -> str:
    def seconds(records: Iterable[RoundRecord]) -> float:
        clients: list[ClientRecord] = [client for record in records for client in record.clients.values()]
        return sum(sum(client.cpu_s.values()) for client in clients)

    sides = (_mean(seconds(found.raw.rounds) for found in side) for side in zip(*pairs, strict=True))
    machines = {tuple(sorted(made.items())) for pair in pairs for found in pair for made, _, _ in _makers(found.raw)}
    where = ", on machines that differ" if len(machines) > 1 else ""
    return " and ".join(f"{side:.0f}" for side in sides) + f" CPU seconds{where}"


def _name(name: str) -> str:
    return f"`{name.removesuffix(PERTURBED)}`" + (", weights * (1 + 1e-7)" if PERTURBED in name else "")


def _percent(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * _mean(values):.1f}{spread}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def main() -> None:
    """Read the command line, which has no options but --help, and write the page and its charts."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    text, charts = page_of(found_in(unpacked(RAW)), lines_of(TRIALS))
    for old in PAGE.parent.glob("results-*.png"):
        old.unlink()
    for name, png in charts.items():
        write_atomic(PAGE.parent / name, png)
    write_atomic(PAGE, text.encode())


if __name__ == "__main__":
    main()
