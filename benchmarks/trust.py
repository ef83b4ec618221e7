"""What trust costs: CPU seconds of signatures, releases and durable writing in rounds of 10 clients, against the rest.

Aggregator and clients share this process and a broker in memory, and train very small models, so everything that isn't
trust costs less than in a fleet: its share is an upper bound. Serving's processes are left out.

    python -m benchmarks.trust [--method pfedgrp] [--out benchmarks/results/trust.json]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.harness import run
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.aggregator.trust.release import Releases
from replayfleet.edge_client.sync.trust import FleetTrust
from replayfleet.federation.wire.transport.seal import Signer, Voices
from tests.support.client_world import World

NUM_CLIENTS = 10
MOST = 0.15


TRUST: Mapping[str, tuple[Any, str]] = {
    "sign messages": (Signer, "seal"),
    "open messages": (Voices, "open"),
    "make releases": (Releases, "signed"),
    "check releases": (FleetTrust, "check"),
    "accept uploads": (AggregatorStore, "accept_upload"),
    "commit rounds": (AggregatorStore, "commit_round"),
    "flush files": (os, "fsync"),
}
"""What trust consists of -> where it is done; none of them calls another one but for files, which are counted once."""


def cpu_of_rounds(method: str, rounds: int) -> tuple[dict[str, float], float]:
    """Return the CPU seconds of a round: of each part of trust, and of this process."""
    spent, inside = dict.fromkeys(TRUST, 0.0), threading.local()

    def timed(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if getattr(inside, "busy", False):
                return work(*arguments, **options)
            inside.busy, began = True, time.thread_time()
            try:
                return work(*arguments, **options)
            finally:
                spent[part] += time.thread_time() - began
                inside.busy = False

        return call

    with ExitStack() as stack:
        for part, (home, name) in TRUST.items():
            stack.enter_context(mock.patch.object(home, name, timed(part, getattr(home, name))))
        world = World(
            Path(stack.enter_context(tempfile.TemporaryDirectory())),
            method,
            num_clients=NUM_CLIENTS,
            num_rounds=None,
            deadline_s=3600.0,
        )
        stack.callback(world.close)
        for number in range(NUM_CLIENTS):
            world.start_client(f"cam-{number}", number)
        rounds_of = world.aggregator.coordinator.rounds
        world.until(lambda: rounds_of.index >= 1, 600)
        first, began, before = rounds_of.index, time.process_time(), dict(spent)
        world.until(lambda: rounds_of.index >= first + rounds, 600)
        count = rounds_of.index - first
        parts = {part: (spent[part] - before[part]) / count for part in spent}
        return parts, (time.process_time() - began) / count


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure some rounds, several times."""
    shares, all_parts = [], []
    for _ in range(options.repeats):
        parts, total = cpu_of_rounds(options.method, options.rounds)
        trust = sum(parts.values())
        shares.append(trust / (total - trust))
        all_parts.append({**parts, "the rest": total - trust})
        print(", ".join(f"{part} {1000 * seconds:.1f} ms" for part, seconds in all_parts[-1].items()), flush=True)
    share = statistics.median(shares)
    print(f"trust costs {share:.1%} of what else a round of {NUM_CLIENTS} clients takes (goal: at most {MOST:.0%})")
    return {"clients": NUM_CLIENTS, "method": options.method, "cpu_s": all_parts, "shares": shares, "share": share}


def _missed(result: dict[str, Any]) -> list[str]:
    return [] if result["share"] <= MOST else [f"trust costs {result['share']:.1%}, at most {MOST:.0%} is the goal"]


if __name__ == "__main__":
    run(measure, __doc__, failed=_missed, method="pfedgrp", rounds=3, repeats=3, threads=1)
