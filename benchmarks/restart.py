"""What an aggregator's restart costs: CPU seconds from ``kill -9`` until it serves again.

The real ``aggregator serve`` with a broker of its own, in a process of its own, killed as soon as it serves. The first
start exports the fleet's graphs; later ones find them.

    python -m benchmarks.restart [--repeats 5] [--out benchmarks/results/restart.json]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import run

METHODS = ("fedavg", "pfedgrp")
MAX_CPU_S = 3.0
SETTLE_S = 2.0
"""After it said that it serves it still subscribes, announces the round and lets its worker begin."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return {method: _restarts(method, options.repeats) for method in METHODS}


def _restarts(method: str, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        first, *later = [_start(method, Path(folder)) for _ in range(1 + repeats)]
    shown = ", ".join(f"{cpu_s:.2f}" for cpu_s in later)
    print(f"{method}: first start {first:.1f} CPU s, restarts {shown}", flush=True)
    return {"first_cpu_s": first, "restart_cpu_s": later, "median_cpu_s": statistics.median(later)}


def _start(method: str, folder: Path) -> float:
    """Start, wait until it serves, kill it; returns its CPU seconds."""
    words = ["serve", "--data-dir", str(folder / "data"), "--fleet", "bench", "--method", method, "--clients", "2"]
    command = [str(Path(sys.executable).with_name("aggregator")), *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            if not any(" serving " in line for line in process.stderr):
                raise RuntimeError(f"{method}: the aggregator ended before it served")
            time.sleep(SETTLE_S)
            spent = psutil.Process(process.pid).cpu_times()
        finally:
            process.kill()
    return float(sum(spent[:4]))


def failed(result: dict[str, Any]) -> Sequence[str]:
    return [
        f"{method}: a restart costs {found['median_cpu_s']:.1f} CPU s"
        for method, found in result.items()
        if found["median_cpu_s"] > MAX_CPU_S
    ]


if __name__ == "__main__":
    run(measure, __doc__, failed=failed, repeats=5)
