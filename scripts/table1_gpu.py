"""Table 1's Fashion-MNIST and CIFAR-10 columns at full scale on a GPU, in pieces that resume.

    python -m scripts.table1_gpu --minutes 9 --out runs/table1-gpu

Runs pFedGRP, FedAvg and Centralized (10 clients, 150 and 120 rounds, the paper's schedules) one after the other until
the minutes are over. The same command goes on where it stopped, and says which runs are unfinished. Needs neither MQTT
nor an installation: a checkout, PyTorch with CUDA, and the packages that the simulator imports. Runs lie where
``fleet-sim table`` looks for them, which then writes the table beside the paper's numbers, with regrets and charts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCENARIOS = ("gradual", "circulating")
DATASETS = ("fashion-mnist", "cifar-10")
METHODS = ("fedavg", "pfedgrp", "centralized")
"""Cheapest first, so that early pieces already finish something."""

LEAST_MINUTES = 1.0
"""With less time left no further run is begun."""

_MAIN = "from federation.scenarios.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table."""

    method: str
    scenario: str
    dataset: str

    def folder(self, options: argparse.Namespace) -> Path:
        """Where its run lies: as ``federation.scenarios.tables.plan`` has it."""
        runs: Path = options.out / "runs"
        return runs / self.method / self.scenario / self.dataset / f"seed-{options.seed}"

    def command(self, minutes: float, options: argparse.Namespace) -> list[str]:
        """Return what runs its next piece."""
        folder = self.folder(options)
        command = [sys.executable, "-c", _MAIN, self.method, "--scenario", self.scenario, "--dataset", self.dataset]
        command += ["--settings", options.settings, "--seed", str(options.seed), "--torch-device", options.torch_device]
        command += ["--minutes", f"{minutes:.2f}", "--out", str(folder)]
        for change in options.overrides:
            command += ["--set", change]
        return [*command, "--resume"] if (folder / "state").exists() else command


def cells() -> Iterator[Cell]:
    """All cells, method by method."""
    for method in METHODS:
        for dataset in DATASETS:
            for scenario in SCENARIOS:
                yield Cell(method, scenario, dataset)


def run(options: argparse.Namespace) -> bool:
    """Run pieces until the time is over; whether every cell is finished."""
    ends = time.monotonic() + 60 * options.minutes
    unfinished = []
    for cell in cells():
        if (cell.folder(options) / "result.json").exists():
            continue
        left = (ends - time.monotonic()) / 60
        if left < LEAST_MINUTES:
            unfinished.append(cell)
            continue
        code = subprocess.run(cell.command(left, options), check=False).returncode
        if code != 0:
            unfinished.append(cell)
            if code != 3:  # 3: the minutes were over
                print(f"{cell.method}, {cell.scenario}, {cell.dataset}: failed, exit code {code}; the rest goes on")
    for cell in unfinished:
        print(f"not finished: {cell.method}, {cell.scenario}, {cell.dataset}")
    print(f"the table: fleet-sim {' '.join(table_arguments(options))}")
    return not unfinished


def table_arguments(options: argparse.Namespace) -> list[str]:
    """Return what makes ``fleet-sim`` write the table of these runs, once they are finished."""
    words = ["table", "1", "--settings", options.settings, "--methods", ",".join(METHODS), "--seeds", str(options.seed)]
    words += ["--torch-device", options.torch_device, "--out", str(options.out)]
    for change in options.overrides:
        words += ["--set", change]
    return words


def main() -> None:
    """Run a piece; exit 0 when the table is complete, else 3."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="of this piece")
    parser.add_argument("--out", type=Path, default=Path("runs/table1-gpu"))
    parser.add_argument("--settings", default="paper")
    parser.add_argument("--torch-device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    sys.exit(0 if run(parser.parse_args()) else 3)


if __name__ == "__main__":
    main()
