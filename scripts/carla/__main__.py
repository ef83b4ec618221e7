"""``make demo-carla``: two vehicles as real processes drive through towns in different orders, and learn on the way.

First they learn what the objects are that they meet (pFedGRP), then where objects are (FedGP over replay). At the end
``runs/demo-carla/report.html`` shows both. Towns are recorded ones of the CARLA simulator, or drawn (``--synthetic``).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
from rich.console import Console

from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.paths import ANY_PATH, FOLDER
from replayfleet.federation.service.words import clock
from replayfleet.federation.simulator.result import hardware
from replayfleet.federation.streams.datasets import DATA_ROOT_VARIABLE
from replayfleet.federation.wire.transport.broker import BrokerHandle, PrivateBroker
from replayfleet.scripts.carla.drive import places, stranding
from replayfleet.scripts.carla.plan import FAST, FULL, MARKER, OWN, VEHICLES, Plan, Size, Work
from replayfleet.scripts.carla.roads import STREET_TOWNS, Roads, StreetRoads, find_recording, thin
from replayfleet.scripts.launch.command import PORT, POSITIVE, log_to, run_demo, this_command
from replayfleet.scripts.launch.fleet import Limit, RunningFleet
from replayfleet.scripts.launch.folder import claimed_folder, clear_folder
from replayfleet.scripts.launch.table import rounds_table

TIME_LIMIT_S = 3600.0
WHERE_TO_GET = (
    "recorded CARLA towns are not on this machine. They are public: the Carla-Object-Detection-Dataset by DanielHfnr "
    "on GitHub (MIT, about 60 MB); put its images and label files as carla/images/, carla/labels/ and "
    "carla/labels.txt into a folder DATA (docs/cameras.md, Recorded driving), and name it: "
    f"make demo-carla ARGS='--data-root DATA', or {DATA_ROOT_VARIABLE}=DATA. "
    "Without them: make demo-carla ARGS=--synthetic drives through drawn streets"
)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--synthetic", is_flag=True, help="Drive through drawn streets instead of recorded towns.")
@click.option("--fast", is_flag=True, help="Shows in two minutes that everything works; learns little.")
@click.option("--data-root", type=ANY_PATH, help=f"Folder that holds carla/; else ${DATA_ROOT_VARIABLE}.")
@click.option("--out", type=FOLDER, default=Path("runs/demo-carla"), help="Folder for the report, films, logs, data.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the models, the training and drawn streets.")
@click.option("--slower", type=click.FloatRange(0.1, 100), default=1.0, help="Factor, for machines that train slower.")
@click.option("--port", type=PORT, help="Of the private broker.  [default: any free one]")
@click.option("--time-limit-s", type=POSITIVE, default=TIME_LIMIT_S, help="Give up after this many seconds.")
def demo_carla(
    out: Path,
    *,
    synthetic: bool,
    fast: bool,
    data_root: Path | None,
    seed: int,
    slower: float,
    port: int | None,
    time_limit_s: float,
) -> None:
    """Let two vehicles learn while they drive through towns in different orders, and write a page about it."""
    console = Console(highlight=False)
    limit = Limit(time.monotonic(), time_limit_s)
    recording = None if synthetic else found_recording(data_root)
    with claimed_folder(out, MARKER), PrivateBroker(port) as broker:
        plan = make_plan(out, FAST if fast else FULL, seed, recording=recording, slower=slower)
        plan.write_tasks()
        plan.note(command=this_command())
        log_to(plan.logs / "demo.log")
        plan.note(broker=broker.handle.description)
        console.print(opening(plan, broker.handle), soft_wrap=True)
        for work in plan.size.works:
            console.print(f"\n{clock(limit.elapsed_s)}  {work.name}: {work.method}", soft_wrap=True)
            _drive(plan, work, broker, console, limit)
        plan.note(seconds=round(limit.elapsed_s, 1), hardware=hardware())
        console.print(f"\n{clock(limit.elapsed_s)}  writing the report")
        from replayfleet.scripts.carla.report import write_report

        write_report(plan.out).show(console, limit)


def opening(plan: Plan, broker: BrokerHandle) -> str:
    """Return what is said before anything runs."""
    minutes = sum(plan.drive_s(work) for work in plan.size.works) / 60
    first = plan.size.works[0]
    ways = [
        f"  {name}: " + ", ".join(plan.drive(first, index).towns) + f", from {plan.roads.describe()}"
        for index, name in enumerate(VEHICLES)
    ]
    lines = [
        f"{len(VEHICLES)} vehicles and an aggregator: {len(plan.size.works)} fleets one after the other, "
        f"{plan.size.num_rounds} rounds each; they drive for {minutes:.0f} minutes in all.",
        *ways,
        f"Broker: {broker.description}.",
        f"Logs: {plan.logs}",
    ]
    if plan.roads.synthetic:
        lines.insert(0, "SYNTHETIC: these streets are drawn. What is learned here says nothing about real ones.")
    return "\n".join(lines)


def found_recording(data_root: Path | None) -> Path:
    """Return the folder of recorded towns.

    Raises:
        SettingsError: There are none; says where to get them.
    """
    recording = find_recording(data_root, os.environ.get(DATA_ROOT_VARIABLE))
    if recording is None:
        raise SettingsError(WHERE_TO_GET)
    return recording


def make_plan(out: Path, size: Size, seed: int, *, recording: Path | None, slower: float) -> Plan:
    """Clear the demo's folder, find the towns of a recording, or without one draw some, and return the plan.

    Raises:
        SettingsError: The folder is somebody else's.
    """
    clear_folder(out, MARKER, OWN, ("logs", "films"))
    roads: Roads
    if recording is None:
        roads = StreetRoads(STREET_TOWNS[: size.num_towns], size.frames_per_town)
    else:
        roads = thin(recording, out / "roads", num_towns=size.num_towns, frames_per_town=size.frames_per_town)
    return Plan(out=out, size=size, roads=roads, seed=seed, slower=slower)


def _drive(plan: Plan, work: Work, broker: PrivateBroker, console: Console, limit: Limit) -> None:
    """Run one part from its start to its end, which is also where the road ends."""
    began = time.monotonic()
    fleet = RunningFleet(plan.fleet(work), broker, console, limit, lambda: places(plan, work))
    complete = fleet.run(enough=stranding(plan, work))
    num_done = len(fleet.record.committed_rounds())
    if not num_done:
        raise ReplayfleetError(
            f"{work.name}: the road was over before the first round was done; this machine needs slower vehicles, "
            f"for example --slower {3 * plan.slower:g}"
        )
    plan.note(**{f"{work.name}_s": round(time.monotonic() - began, 1), f"{work.name}_complete": complete})
    if not complete:
        console.print(
            f"{work.name}: the road was over after {num_done} of {plan.size.num_rounds} rounds, because this machine "
            f"trains slower than planned; --slower {2 * plan.slower:g} gives it time.",
            soft_wrap=True,
        )
    console.print(rounds_table(fleet.record))


def main() -> None:
    """Run the command; exit codes and messages are ``run_demo``'s."""
    run_demo(demo_carla, "demo-carla")


if __name__ == "__main__":
    main()
