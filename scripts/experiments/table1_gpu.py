"""Table 1's Fashion-MNIST and CIFAR-10 columns at full scale on a GPU, in pieces that resume.

    python -m replayfleet.scripts.experiments.table1_gpu --minutes 9 --data-root DATA --out runs/table1-gpu

Runs pFedGRP, FedAvg and Centralized (10 clients, 150 and 120 rounds, the paper's schedules) one after the other until
the minutes are over. The same command goes on where it stopped, and says which runs are unfinished. Needs neither MQTT
nor an installation: a checkout, PyTorch with CUDA, and the packages that the simulator imports. Without --data-root,
data sets are looked for below $REPLAYFLEET_DATA. Runs lie where ``fleet-sim table`` looks for them, which then writes
the table beside the paper's numbers, with regrets and charts.

Exit code 0: all runs are finished; 1: a run failed or can't be made; 2: nothing can be run; 3: the minutes are over,
and the same command goes on; 130: Ctrl-C, and the same command goes on.

Torch and the methods are imported when runs are planned, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.simulator.exit_codes import UNFINISHED
from replayfleet.federation.simulator.tables.paper import paper_table
from replayfleet.federation.simulator.tables.wording import count_of

if TYPE_CHECKING:
    from replayfleet.federation.simulator.tables.plan import Choice, PlannedRun

TABLE = "1"
DATASETS = ("fashion-mnist", "cifar-10")
METHODS = ("fedavg", "pfedgrp", "centralized")
"""Cheapest first, so that early pieces already finish something."""

LEAST_MINUTES = 1.0
"""With less time left no further run is begun."""

show = functools.partial(print, flush=True)


def planned(choice: Choice) -> list[PlannedRun]:
    """Return all runs, method by method.

    Raises:
        SettingsError: The operator named an unknown setting, or what ``choice.out`` holds can't be read.
    """
    from replayfleet.federation.simulator.tables.plan import Planner

    planners = [Planner(dataclasses.replace(choice, dataset=dataset)) for dataset in DATASETS]
    runs = [run for planner in planners for run in planner.runs(paper_table(TABLE))]
    return sorted(runs, key=lambda run: METHODS.index(run.row.method))


def run_piece(choice: Choice, minutes: float) -> int:
    """Run what is missing until the minutes are over; returns the exit code.

    Raises:
        SettingsError: Nothing can be run.
    """
    from replayfleet.federation.simulator.tables import running
    from replayfleet.federation.simulator.tables.plan import State

    ends = time.monotonic() + 60 * minutes
    runs = planned(choice)
    if all(run.state is State.IMPOSSIBLE for run in runs):
        raise SettingsError(f"nothing can be run: {runs[0].problem}")
    to_do = [run for run in runs if run.state in {State.BEGUN, State.MISSING}]
    problems = _not_possible(runs)
    num_finished = sum(run.state is State.FINISHED for run in runs)
    show(f"{count_of(len(to_do), 'run')} to do, {num_finished} finished before")
    unfinished = []
    for run in to_do:
        left = (ends - time.monotonic()) / 60
        if left < LEAST_MINUTES:
            unfinished.append(run)
            continue
        runner = running.Runner([run], 1, launch=running.launch_process, minutes=left, show=show)
        problems += [f"FAILED: {run.name}: {failure.reason}" for failure in runner.run_all()]
        unfinished += runner.unfinished
    for line in [*problems, *(f"not finished: {run.name}" for run in unfinished)]:
        show(line)
    show(f"the table: {shlex.join(['fleet-sim', *table_arguments(choice)])}")
    return 1 if problems else UNFINISHED if unfinished else 0


def _not_possible(runs: Sequence[PlannedRun]) -> list[str]:
    """Return a line for each reason."""
    from replayfleet.federation.simulator.tables.plan import State

    reasons: dict[str, list[str]] = {}
    for run in runs:
        if run.state is State.IMPOSSIBLE:
            reasons.setdefault(run.problem, []).append(f"{run.row.method} on {run.column.title}")
    return [f"not possible: {reason} ({'; '.join(names)})" for reason, names in reasons.items()]


def table_arguments(choice: Choice) -> list[str]:
    """Return what makes ``fleet-sim`` write the table of these runs, once they are finished."""
    words = ["table", TABLE, "--settings", choice.preset, "--methods", ",".join(choice.methods)]
    words += ["--seeds", ",".join(map(str, choice.seeds)), "--torch-device", choice.torch_device]
    for override in choice.overrides:
        words += ["--set", override]
    if choice.data_root is not None:
        words += ["--data-root", str(choice.data_root)]
    return [*words, "--out", str(choice.out)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a piece, and exit."""
    options = _parser().parse_args(arguments)
    try:
        code = run_piece(_choice(options), options.minutes)
    except ReplayfleetError as error:
        print(f"table1_gpu: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("table1_gpu: stopped; the same command goes on after the last complete round", file=sys.stderr)
        code = 130
    sys.exit(code)


def _choice(options: argparse.Namespace) -> Choice:
    from replayfleet.federation.simulator.tables.plan import Choice, workers_each

    return Choice(
        out=options.out,
        preset=options.settings,
        seeds=(options.seed,),
        methods=METHODS,
        overrides=tuple(options.overrides),
        data_root=options.data_root,
        download=options.download,
        torch_device=options.torch_device,
        workers=workers_each(1, options.torch_device),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=_minutes, default=9.0, help=f"of this piece; less than {LEAST_MINUTES:g} runs nothing"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/table1-gpu"))
    parser.add_argument("--settings", default="paper", help="paper, small, demo or tiny")
    parser.add_argument("--torch-device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-root", type=Path, help="folder of data sets; else $REPLAYFLEET_DATA")
    parser.add_argument("--download", action="store_true", help="let torchvision fetch a data set that is not found")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="in every method that has KEY"
    )
    return parser


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"{text}, expected more than 0")
    return minutes


if __name__ == "__main__":
    main()
