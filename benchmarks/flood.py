"""What one hostile member costs a fleet: an aggregator's memory, the honest clients' rounds, its log.

A real aggregator process and three honest clients over mosquitto do small rounds, calm and while a fourth member writes
to the broker as fast as the loopback takes it; a new fleet for each attack. Clients train for ``--training-s``, much
less than any real one does; 0 measures the protocol alone, whose rounds of 50 ms last up to 2.5 times as long beside a
flood that takes one of two cores for itself and one for the broker.

    python -m benchmarks.flood [--seconds 30] [--training-s 1] [--out benchmarks/results/flood.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import run

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # where the tests' support is found by its short name

from support.flood import ATTACKS
from support.flooded_fleet import flooded_fleet

LIMIT_S = 600.0
MAX_MEMORY_MB = 100.0
MAX_RATIO = 2.0
MAX_WARNINGS_PER_S = 10.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    attacks = {**{kind: [kind] for kind in ATTACKS}, "all": list(ATTACKS)}
    return {name: attacked(kinds, options) for name, kinds in attacks.items() if options.only in {"", name}}


def attacked(kinds: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return what these attacks cost a fleet of their own."""
    turns = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder, flooded_fleet(Path(folder), options.training_s) as fleet:
            fleet.rounds(1.0, 3, LIMIT_S)
            calm = fleet.rounds(options.seconds / 2, 3, LIMIT_S)
            turns.append((calm, fleet.flooded(kinds, options.seconds, 3, LIMIT_S)))
    found = {
        "memory_rise_mb": max(flooded.memory_mb - calm.memory_mb for calm, flooded in turns),
        "round_ratio": statistics.median(flooded.round_s / calm.round_s for calm, flooded in turns),
        "cpu_ratio": statistics.median(
            flooded.cpu_s / flooded.rounds * calm.rounds / calm.cpu_s for calm, flooded in turns
        ),
        "warnings_per_s": max(flooded.warnings / flooded.seconds for _, flooded in turns),
        "turns": [{"calm": asdict(calm), "flooded": asdict(flooded)} for calm, flooded in turns],
    }
    sent = turns[-1][1]
    print(
        f"{'+'.join(kinds)[:18]:18} memory +{found['memory_rise_mb']:3.0f} MB  rounds x{found['round_ratio']:.2f}  "
        f"CPU of a round x{found['cpu_ratio']:.2f}  {found['warnings_per_s']:.1f} warnings/s  sent: "
        f"{sent.sent_messages / sent.seconds:6,.0f} messages/s, {sent.sent_mb / sent.seconds:.0f} MB/s",
        flush=True,
    )
    return found


def failed(result: dict[str, Any]) -> Sequence[str]:
    missed = []
    for name, found in result.items():
        if found["memory_rise_mb"] > MAX_MEMORY_MB:
            missed.append(f"{name}: {found['memory_rise_mb']:.0f} MB more memory")
        if found["round_ratio"] > MAX_RATIO:
            missed.append(f"{name}: rounds take {found['round_ratio']:.2f} times as long")
        if found["warnings_per_s"] > MAX_WARNINGS_PER_S:
            missed.append(f"{name}: {found['warnings_per_s']:.1f} warnings a second")
    return missed


if __name__ == "__main__":
    run(measure, __doc__, failed=failed, seconds=30.0, training_s=1.0, repeats=1, only=("", "one attack"))
