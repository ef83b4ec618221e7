"""What a finite pill costs a round: CPU seconds of the aggregation's job with it, against the same round without it.

Every method that deploys, with real uploads of a small network, the real export and its gate; one client's upload is
replaced by each pill in turn, and every round with a pill stands beside an honest one. Training, which is most of a
round, is left out, so that the ratio is an upper bound.

    python -m benchmarks.pills [--methods fedavg pfedgrp] [--clients 5] [--out benchmarks/results/pills.json]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.harness import run

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # where the tests' support is found by its short name

from replayfleet.aggregator.serving import OnnxExporter
from replayfleet.federation.methods.kit.records import Artefacts
from tests.support.pills import DEPLOYED, Fleet, fleet, pills_of
from tests.support.toy import TOY

WHERE = "cam-2"
MOST = 2.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return {name: of_method(name, options) for name in options.methods}


def of_method(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return CPU seconds of rounds with and without each pill."""
    members = fleet(name, options.clients)
    exporter = OnnxExporter(members.method, TOY)
    timed(members, members.uploads, exporter)  # compares the graph once, as every aggregator does
    usual, found = [], {}
    for what, pill in pills_of(members).items():
        with_pill = {**members.uploads, WHERE: pill(members.uploads[WHERE])}
        usual.append(timed(members, members.uploads, exporter)[0])
        pill_s, aggregations, left_out = timed(members, with_pill, exporter)
        turns = [pill_s]
        while len(turns) < options.repeats and statistics.median(turns) > MOST * statistics.median(usual):
            turns.append(timed(members, with_pill, exporter)[0])  # was it the pill, or the machine?
        found[what] = {"cpu_s": turns, "left_out": left_out, "aggregations": aggregations}
    usual_s = statistics.median(usual)
    ratios = {what: statistics.median(one["cpu_s"]) / usual_s for what, one in found.items()}
    worst = max(ratios, key=lambda what: ratios[what])
    print(f"{name:18} usual {usual_s:6.3f} CPU s, at most x{ratios[worst]:.2f} ({worst})", flush=True)
    return {"usual_cpu_s": usual, "pills": {what: {"ratio": ratios[what], **one} for what, one in found.items()}}


def timed(members: Fleet, uploads: Mapping[str, Artefacts], exporter: OnnxExporter) -> tuple[float, int, list[str]]:
    """Return CPU seconds of a round's aggregation, how often the method aggregated, and whom it left out."""
    aggregation, manifests = members.prepared(uploads, exporter=exporter)
    kind, calls = type(members.method), []
    aggregate: Callable[..., Any] = kind.aggregate

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        return aggregate(*arguments, **more)

    with mock.patch.object(kind, "aggregate", counted):
        gc.collect()  # what earlier rounds left is none of this one's
        began = time.process_time()
        result = aggregation.run(0, manifests, None)
        return time.process_time() - began, len(calls), list(result.quarantined)


def failed(result: dict[str, Any]) -> list[str]:
    missed = []
    for name, measured in result.items():
        for what, one in measured["pills"].items():
            if one["ratio"] > MOST:
                missed.append(f"{name}: {what} costs {one['ratio']:.2f} times a round")
            if one["left_out"] != [WHERE]:
                missed.append(f"{name}: {what} leaves out {one['left_out']}")
    return missed


if __name__ == "__main__":
    run(measure, __doc__, failed=failed, methods=DEPLOYED, clients=5, repeats=3, threads=1)
