r"""All experiments behind docs/results.md, in the order of what they tell: what is left and how long, and goes on.

    make reproduce ARGS="--dry-run"          # what is done and what is left
    make reproduce ARGS="--minutes 60"       # goes on for an hour; the same command again goes on from there

Each block is a ``fleet-sim table`` with choices of its own, below one folder; a run that serves several blocks is made
once. A crash, Ctrl-C or the end of the minutes loses at most the rounds that were running.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.paths import FOLDER, NEW_FILE
from replayfleet.federation.service.command import run_command
from replayfleet.federation.service.torch_setup import let_idle_threads_sleep
from replayfleet.federation.service.words import count_of
from replayfleet.federation.simulator.exit_codes import UNFINISHED
from replayfleet.federation.simulator.tables import running
from replayfleet.federation.simulator.tables.measured import cells
from replayfleet.federation.simulator.tables.paper import Column, PaperTable, paper_table
from replayfleet.federation.simulator.tables.plan import Choice, PlannedRun, Planner, State, distinct
from replayfleet.federation.simulator.tables.report import Report
from replayfleet.scripts.experiments.raw_results import pack

RIVALS = ("centralized", "pfedgrp", "pfedgrp-plus", "fedcil", "mfcl", "lander", "fedavg-replay", "fedavg")
"""What the claim is made of; Centralized first, for regrets need it."""

LEADERS = ("centralized", "pfedgrp", "pfedgrp-plus", "fedcil")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Experiments that tell one thing.

    Attributes:
        name: of its folder.
        shows: for people.
        below: whose folder it shares, and so its runs; its own if empty.
        number: of the table that it fills.
        methods, scenarios, datasets, preset, clients, rounds, seeds, overrides, noise_floor: as of ``Choice``.
    """

    name: str
    shows: str
    below: str = ""
    number: str = "1"
    methods: tuple[str, ...]
    scenarios: tuple[str, ...] = ("gradual", "circulating")
    datasets: tuple[str, ...] = ("fashion-mnist",)
    preset: str = "small"
    clients: int | None = None
    rounds: int | None = None
    seeds: tuple[int, ...] = (0,)
    overrides: tuple[str, ...] = ()
    noise_floor: bool = False


_SHORT = ("precision=bfloat16",)
_AS_THEY_ARE = ("smooth_share=0", "detail_share=0")

_PILOT = Block(
    name="pilot",
    shows="two clients and ten rounds of small, in bfloat16: what an evening shows of the claim",
    methods=RIVALS,
    clients=2,
    rounds=10,
    seeds=(0, 1, 2),
    overrides=_SHORT,
    noise_floor=True,
)


def _beside_pilot(name: str, shows: str, *overrides: str, **changes: Any) -> Block:
    """Return a block of the pilot's size, of one seed and without a noise floor."""
    once = dataclasses.replace(_PILOT, seeds=(0,), noise_floor=False, name=f"pilot-{name}", shows=shows)
    return dataclasses.replace(once, overrides=(*_SHORT, *overrides), **changes)


_PLUS = {"methods": ("pfedgrp-plus",)}
_CENTRALIZED = {"methods": ("centralized",), "scenarios": ("gradual",), "seeds": _PILOT.seeds}
_CLAIMED = {"methods": ("centralized", "pfedgrp", "pfedgrp-plus"), "scenarios": ("gradual",)}
_GAUSSIAN = "sub_generator=pca-gaussian"

BLOCKS = (
    _PILOT,
    _beside_pilot("gaussian", "pFedGRP-plus with one Gaussian for a class, which shows less of it", _GAUSSIAN, **_PLUS),
    _beside_pilot("mixture", "pFedGRP-plus whose replay and samples look as they are", *_AS_THEY_ARE, **_PLUS),
    _beside_pilot(
        "bare",
        "pFedGRP-plus with one Gaussian, and looks as they are",
        _GAUSSIAN,
        *_AS_THEY_ARE,
        **_PLUS,
    ),
    _beside_pilot(
        "given",
        "what pFedGRP-plus has, given to pFedGRP and to its baseline",
        *("sub_generator=pca-mixture", "gate=false", "smooth_share=1", "detail_share=0.5"),
        methods=("pfedgrp", "fedavg-replay"),
    ),
    _beside_pilot("gated", "pFedGRP-plus with pFedGRP's gate: each sub-generator learns once", "gate=true", **_PLUS),
    _beside_pilot(
        "ungated",
        "pFedGRP whose sub-generators learn in every round, as pFedGRP-plus's do: its gate lets each learn once here",
        methods=("pfedgrp-as2",),
        number="3",
    ),
    _beside_pilot("epochs", "whether twice as many epochs change Centralized", "local_epochs=16", **_CENTRALIZED),
    _beside_pilot(
        "full",
        "Centralized on all samples in every round, beside its constant number",
        "samples_per_round=0",
        **_CENTRALIZED,
    ),
    _beside_pilot(
        "digits",
        "handwritten digits, on which nothing was chosen",
        methods=("centralized", "pfedgrp-plus", "pfedgrp"),
        scenarios=("gradual",),
        datasets=("mnist",),
        seeds=(0, 1, 2),
    ),
    _beside_pilot(
        "photographs",
        "CIFAR-10 at the same size",
        methods=LEADERS,
        scenarios=("gradual",),
        datasets=("cifar-10",),
        seeds=(0, 1),
    ),
    *(
        _beside_pilot(
            f"overlap-{n}", f"classes that a client's neighbouring tasks share: {n}", f"overlap={n}", **_CLAIMED
        )
        for n in (2, 4)
    ),
    *(_beside_pilot(f"clients-{n}", "more clients", clients=n, **_CLAIMED) for n in (5, 10)),
    *(
        _beside_pilot(
            f"absent-{n}", f"clients that miss a round: {n} of five", f"num_absent={n}", clients=5, **_CLAIMED
        )
        for n in (1, 2)
    ),
    Block(name="small", shows="the claim", methods=RIVALS, seeds=(0, 1, 2), overrides=_SHORT, noise_floor=True),
    Block(
        name="small-int8",
        shows="what fewer bytes cost, beside the same runs of small, which lose nothing on the way",
        methods=("pfedgrp",),
        scenarios=("gradual",),
        seeds=(0, 1, 2),
        overrides=(*_SHORT, "models_travel_as=int8", "sub_generators_travel_as=float16"),
    ),
    Block(
        name="small-epochs",
        shows="whether twice as many epochs change Centralized",
        methods=("centralized",),
        overrides=(*_SHORT, "local_epochs=16"),
    ),
    Block(
        name="small-full",
        shows="Centralized on all samples in every round, beside its constant number",
        methods=("centralized",),
        overrides=(*_SHORT, "samples_per_round=0"),
    ),
    Block(
        name="small-others",
        shows="the other methods",
        below="small",
        methods=("pfedgraph", "affcl", "target", "fedprox", "fedem", "pfedgraph-replay"),
        scenarios=("gradual",),
        overrides=_SHORT,
    ),
    Block(
        name="small-ablations",
        shows="pFedGRP without one part at a time",
        below="small",
        number="3",
        methods=("pfedgrp-as1", "pfedgrp-as2", "pfedgrp-as3", "pfedgrp-asg", "pfedgrp-asp"),
        scenarios=("gradual",),
        overrides=_SHORT,
    ),
    Block(
        name="small-credit",
        shows="balanced cross-entropy, a lever of pfedgrp-plus",
        methods=("pfedgrp-plus",),
        seeds=(0, 1, 2),
        overrides=(*_SHORT, "replay_credit=0.5"),
    ),
    Block(
        name="small-credit-less",
        shows="balanced cross-entropy in which replay counts for less still",
        methods=("pfedgrp-plus",),
        scenarios=("gradual",),
        seeds=(0, 1, 2),
        overrides=(*_SHORT, "replay_credit=0.25"),
    ),
    Block(
        name="small-choose",
        shows="the aggregator's choice, a lever of pfedgrp-plus",
        methods=("pfedgrp-plus",),
        scenarios=("gradual",),
        overrides=(*_SHORT, "choose=true"),
    ),
    Block(
        name="cifar-10",
        shows="photographs",
        methods=LEADERS,
        scenarios=("gradual",),
        datasets=("cifar-10",),
        seeds=(0, 1),
    ),
    Block(
        name="medium",
        shows="the same direction with ten clients",
        methods=LEADERS,
        scenarios=("gradual",),
        preset="medium",
    ),
)
"""In the order in which they are run."""

ROWS: dict[str, dict[str, Any]] = {"mfcl": {"replay_labels": "latents"}}
"""Method -> what its rows change in the preset. MFCL's replay has the labels it was drawn for (Eq. 1 of its paper)."""


def table_of(block: Block) -> PaperTable:
    """Return the table that a block fills: without the paper's numbers where its data sets are others."""
    table = paper_table(block.number)
    asked = [Column(scenario=scenario, dataset=dataset) for scenario in block.scenarios for dataset in block.datasets]
    if not {one.title for one in asked} <= {column.title for column in table.columns}:  # nothing of the paper's fits
        return msgspec.structs.replace(table, columns=tuple(asked), rows=(), notes=())
    rows = tuple(msgspec.structs.replace(row, set={**row.set, **ROWS.get(row.method, {})}) for row in table.rows)
    return msgspec.structs.replace(table, rows=rows)


def choice_of(block: Block, out: Path, **given: Any) -> Choice:
    """Return what a block asks of ``fleet-sim table``."""
    shared = {field.name for field in dataclasses.fields(Choice)} & {field.name for field in dataclasses.fields(Block)}
    return Choice(out=out / (block.below or block.name), **{name: getattr(block, name) for name in shared}, **given)


def planned(block: Block, choice: Choice) -> list[PlannedRun]:
    """Return the runs of a block as they are now, seed by seed, then by experiment and in the order of its methods."""
    runs = Planner(choice).runs(table_of(block))
    scenarios = block.scenarios.index
    return sorted(
        runs,
        key=lambda run: (
            run.seed,
            run.row.perturbed,
            scenarios(run.column.scenario),
            block.methods.index(run.row.method),
        ),
    )


def write_table(block: Block, choice: Choice) -> list[Path]:
    """Write a block's table and charts of what is finished, below its own name."""
    table, planner = table_of(block), Planner(choice)
    runs = planner.runs(table)
    places: dict[tuple[str, int], Column] = {(run.column.slug, run.seed): run.column for run in runs}
    references = {place: planner.reference(column, place[1]) for place, column in places.items()}
    report = Report(
        table=table,
        choice=dataclasses.replace(choice, out=choice.out.parent / "tables" / block.name),
        cells=cells(table, runs, references),
        command=["make", "reproduce"],
    )
    return report.write()


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--out", type=FOLDER, default=Path("runs/reproduce"), help="Folder of all runs and tables.")
@click.option("--blocks", default="", help="Comma-separated names; all without.")
@click.option("--minutes", type=click.FloatRange(min=0), default=None, help="Begin no round that would end later.")
@click.option("--jobs", "num_jobs", type=click.IntRange(1), default=2, help="Runs at a time, with one client each.")
@click.option("--torch-device", default="cpu", help="Where methods compute; what is finished counts wherever it ran.")
@click.option("--data-root", type=click.Path(path_type=Path), default=None, help="Folder of data sets.")
@click.option("--pack", "packed", type=NEW_FILE, default=None, help="Write all raw results to this file at the end.")
@click.option("--dry-run", is_flag=True, help="Say what is left, and stop.")
def reproduce(  # options
    out: Path,
    blocks: str,
    minutes: float | None,
    num_jobs: int,
    torch_device: str,
    data_root: Path | None,
    packed: Path | None,
    *,
    dry_run: bool,
) -> int:
    """Run the experiments behind docs/results.md that are left; exit code 3: the same command goes on."""
    let_idle_threads_sleep()
    names, known = [name.strip() for name in blocks.split(",") if name.strip()], [block.name for block in BLOCKS]
    for name in names:
        if name not in known:
            raise SettingsError(f"--blocks: unknown block {name!r}{nearest(name, known)}")
    wanted = [block for block in BLOCKS if not names or block.name in names]
    choices = {
        block.name: choice_of(block, out, data_root=data_root, torch_device=torch_device, workers=1) for block in wanted
    }
    runs = {block.name: planned(block, choices[block.name]) for block in wanted}
    everything = [run for own in runs.values() for run in own]
    to_do = [*distinct(everything, State.BEGUN), *distinct(everything, State.MISSING)]
    order = {run.folder: place for place, run in reversed(list(enumerate(everything)))}
    to_do.sort(key=lambda run: order[run.folder])
    runner = running.Runner(
        to_do,
        num_jobs,
        minutes=minutes,
        earlier=running.earlier_work(distinct(everything, State.FINISHED)),
        launch=running.launch_process,
        show=click.echo,
    )
    for block in wanted:
        click.echo(line_of(block, runs[block.name]))
    click.echo(f"{count_of(len(to_do), 'run')} left: {runner.estimate()} with --jobs {num_jobs}")
    if dry_run:
        return UNFINISHED if to_do else 0
    failures = runner.run_all()
    for block in wanted:
        write_table(block, choices[block.name])
    if packed is not None:
        click.echo(f"{packed}: raw results of {count_of(pack(out, packed), 'run')}")
    return 1 if failures else UNFINISHED if runner.unfinished else 0


def line_of(block: Block, runs: Sequence[PlannedRun]) -> str:
    """Return how far a block is."""
    done, begun = (len(distinct(runs, state)) for state in (State.FINISHED, State.BEGUN))
    impossible = distinct(runs, State.IMPOSSIBLE)
    total = len({run.folder for run in runs})
    text = f"{block.name:>16}  {done} of {count_of(total, 'run')} done"
    text += f", {begun} begun" if begun else ""
    text += f", {len(impossible)} impossible ({impossible[0].problem})" if impossible else ""
    return f"{text}: {block.shows}"


if __name__ == "__main__":
    run_command(reproduce, "reproduce")
