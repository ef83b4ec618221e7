"""``fleet-sim table``: run what a table of the papers needs, and write it beside the published numbers.

Torch and the methods are imported when runs are planned, so that ``--help`` and ``--list`` answer at once.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.help_groups import HELP, GroupedCommand
from replayfleet.federation.paths import FOLDER, without_machine
from replayfleet.federation.service.words import count_of
from replayfleet.federation.simulator.exit_codes import UNFINISHED
from replayfleet.federation.simulator.run_spec import options_like
from replayfleet.federation.simulator.tables.paper import paper_table, paper_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayfleet.federation.simulator.tables.plan import Choice, PlannedRun

_COST_TABLES = ("6", "7", "8", "9")
_COST_OPTIONS = {"number", "out", "dry_run"}
_FID_TABLE = "10"
_FEATURES = ("task", "inception")


def _comma_separated(_context: Any, option: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    parts = tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
    if texts and not parts:
        raise SettingsError(f"{option.opts[0]} is empty, expected at least one")
    return parts


_listed = partial(click.option, multiple=True, callback=_comma_separated)


@click.command(cls=GroupedCommand, context_settings=HELP | {"show_default": True})
@click.argument("number", required=False)
@click.option("--list", "listing", is_flag=True, help="Show the tables, and stop.")
@click.option("--out", type=FOLDER, help="Folder for runs and tables; tables 6 to 9 need none.")
@_listed("--seeds", help="Comma-separated.  [default: the table's]")
@_listed("--methods", help="Comma-separated.  [default: the table's]")
@_listed("--scenario", "scenarios", help="Only columns of these, comma-separated.")
@_listed("--dataset", "datasets", help="Only columns of these, comma-separated.")
@click.option("--jobs", "num_jobs", type=int, default=2, help="Runs at a time; each trains cores / jobs clients.")
@click.option(
    "--noise-floor",
    is_flag=True,
    help="Run each row again from weights scaled by 1 + 1e-7: what a difference must exceed.",
)
@click.option("--features", default="task", help="Of table 10's FID: task (model's) or inception (replayfleet[fid]).")
@click.option("--dry-run", is_flag=True, help="Show what would run, and stop.")
@click.pass_context
def table(context: click.Context, /, **options: Any) -> int:
    """Run what table NUMBER of pFedGRP needs (v1-1 to v1-8: of its first version) and set it beside the paper's.

    Tables driving-crops and driving-boxes are our own, over recorded driving; fedgp-rotated, fedgp-messages,
    mfcl-sequential, sdd-few-shot, sdd-released-steps, sdd-forty-classes and sdd-few-base are those of FedGP, MFCL and
    SDD at a size of ours.

    Runs land in OUT/runs/<method>/<scenario>/<dataset>/seed-<K>; those that exist are not run again, and interrupted
    ones go on. Then OUT/table-<NUMBER>.md, .json and a chart per column are written. Exit code 3: --minutes ended runs
    that the same command goes on with. Tables 6 to 9 need no runs: they are printed, and written if there is an OUT.
    """
    number = options.pop("number")
    if options.pop("listing"):
        for known, title in _titles().items():
            click.echo(f"{known:>5}  {title}")
        return 0
    if number is None:
        raise click.UsageError("Missing argument 'NUMBER'; --list shows the tables")
    if number not in _titles():
        raise SettingsError(f"unknown table {number!r}{nearest(number, _titles())}")
    if number in _COST_TABLES:
        _check_cost_options(context, number)
    if options["features"] != "task" and number != _FID_TABLE:
        raise SettingsError(f"--features is of table {_FID_TABLE}'s FID; leave it out for table {number}")
    _check_execution(**{name: options[name] for name in ("num_jobs", "minutes", "features")})
    from replayfleet.federation.service.torch_setup import let_idle_threads_sleep

    let_idle_threads_sleep()
    if options["features"] == "inception":
        from replayfleet.federation.simulator.measures.fid import require_inception

        require_inception()
    if number in _COST_TABLES:
        return _cost_table(number, options["out"], dry_run=options["dry_run"])
    if options["out"] is None:
        raise SettingsError("--out is missing; say where runs and tables are to be written")
    execution = {name: options.pop(name) for name in ("num_jobs", "minutes", "dry_run", "features")}
    return _run_table(number, _choice(options, execution["num_jobs"]), **execution)


table.params += options_like(
    ("preset", "clients", "rounds", "data_root", "download", "overrides", "torch_device", "in_step", "minutes"),
    clients="Clients of every run whose column doesn't set them.",
    rounds="Rounds of every run.",
    overrides="Changes one setting, in every method that has it.",
    in_step="Train what clients ask for at the same time as one network, where methods can.",
    minutes="Begin no round that would end later; 0 runs nothing.",
)


def _check_cost_options(context: click.Context, number: str) -> None:
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name not in _COST_OPTIONS
        and context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    ]
    if given:
        raise SettingsError(f"table {number} runs nothing and takes only --out and --dry-run, not {', '.join(given)}")


def _check_execution(*, num_jobs: int, minutes: float | None, features: str) -> None:
    if num_jobs < 1:
        raise SettingsError(f"--jobs is {num_jobs}, expected at least 1")
    if minutes is not None and not minutes >= 0:
        raise SettingsError(f"--minutes is {minutes:g}, expected 0 or more")
    if features not in _FEATURES:
        raise SettingsError(f"unknown features {features!r}{nearest(features, _FEATURES)}")


def _titles() -> dict[str, str]:
    from replayfleet.federation.simulator.tables.costs_paper import COST_TITLES

    titles = {**COST_TITLES, **{number: found.title for number, found in paper_tables().items()}}
    numbered = sorted((name for name in titles if name.isdecimal()), key=int)
    return {name: titles[name] for name in [*numbered, *(name for name in titles if not name.isdecimal())]}


def _choice(options: dict[str, Any], num_jobs: int) -> Choice:
    from replayfleet.federation.simulator.run_spec import MAX_SEED
    from replayfleet.federation.simulator.tables.plan import Choice, workers_each

    try:
        seeds = tuple(dict.fromkeys(int(seed) for seed in options.pop("seeds")))
    except ValueError as error:
        raise SettingsError(f"--seeds: {error}; expected whole numbers with commas between") from error
    if seeds and not 0 <= min(seeds) <= max(seeds) <= MAX_SEED:
        raise SettingsError(f"--seeds: {min(seeds)} to {max(seeds)}, expected 0 to {MAX_SEED}")
    return Choice(seeds=seeds, workers=workers_each(num_jobs, options["torch_device"]), **options)


def _run_table(
    number: str, choice: Choice, *, num_jobs: int, minutes: float | None, dry_run: bool, features: str
) -> int:
    from replayfleet.federation.service.settings import split_overrides
    from replayfleet.federation.simulator.tables import running
    from replayfleet.federation.simulator.tables.measured import cells
    from replayfleet.federation.simulator.tables.plan import Planner, State, distinct
    from replayfleet.federation.simulator.tables.report import Report

    wanted = paper_table(number)
    choice = replace(choice, seeds=choice.seeds or wanted.seeds)
    changes = {**split_overrides(wanted.overrides), **split_overrides(choice.overrides)}
    planned = replace(choice, overrides=tuple(f"{key}={text}" for key, text in changes.items()))
    runs = Planner(planned).runs(wanted)
    if all(run.state is State.IMPOSSIBLE for run in runs):
        raise SettingsError(f"nothing of table {number} can be run: {runs[0].problem}")
    to_do = [*distinct(runs, State.BEGUN), *distinct(runs, State.MISSING)]
    if choice.methods:  # in the operator's order, so that a first hour already finishes something where she wants it
        to_do.sort(key=lambda run: (run.seed, choice.methods.index(run.row.method)))
    earlier = running.earlier_work(distinct(runs, State.FINISHED))
    runner = running.Runner(
        to_do, num_jobs, minutes=minutes, earlier=earlier, launch=running.launch_process, show=click.echo
    )
    _show_plan(runs, to_do, runner.estimate(), verbose=dry_run)
    if dry_run:
        return 0
    failures = runner.run_all()

    planner = Planner(planned)
    runs = planner.runs(wanted)
    if number == _FID_TABLE:
        from replayfleet.federation.simulator.tables.fid_cells import fid_cells

        measured = fid_cells(wanted, runs, failures, features=features, show=click.echo)
    else:
        places = {(run.column.slug, run.seed): run.column for run in runs}
        asked = "AR" in wanted.metrics
        references = {place: planner.reference(column, place[1]) for place, column in places.items() if asked}
        measured = cells(wanted, runs, references, failures)
    report = Report(table=wanted, choice=choice, cells=measured, command=["fleet-sim", *without_machine(sys.argv[1:])])
    click.echo(f"wrote {', '.join(str(path) for path in report.write())}")
    for failure in failures:
        click.echo(f"FAILED: {failure.run.name}: {failure.reason}", err=True)
    if runner.unfinished:
        click.echo(
            f"stopped: {minutes:g} minutes have passed; the same command goes on with "
            f"{count_of(len(runner.unfinished), 'run')}"
        )
    return 1 if failures else UNFINISHED if runner.unfinished else 0


def _show_plan(runs: Sequence[PlannedRun], to_do: Sequence[PlannedRun], estimate: str, *, verbose: bool) -> None:
    from replayfleet.federation.simulator.tables.plan import State, distinct

    if verbose:
        for run in to_do:
            click.echo(f"{run.state.value:>10}  {shlex.join(run.spec.command())}")
        for run in distinct(runs, State.FINISHED):
            click.echo(f"{run.state.value:>10}  {run.folder}")
    reasons: dict[str, list[PlannedRun]] = {}
    for run in runs:
        if run.state is State.IMPOSSIBLE:
            reasons.setdefault(run.problem, []).append(run)
    for reason, group in reasons.items():
        # Each name once: what is missing is a row's or a column's, and twenty cells of it can't be read.
        rows = ", ".join(dict.fromkeys(run.row.label for run in group))
        columns = "; ".join(dict.fromkeys(run.column.title for run in group))
        click.echo(f"not possible: {reason} ({rows} on {columns})")
    num_finished = len(distinct(runs, State.FINISHED))
    click.echo(f"{count_of(len(to_do), 'run')} to do, {num_finished} finished before; {estimate}")


def _cost_table(number: str, out: Path | None, *, dry_run: bool) -> int:
    from replayfleet.federation.simulator.tables.costs_report import cost_report

    text = cost_report(number, out)
    click.echo(text, nl=False)
    if out is not None and not dry_run:
        from replayfleet.federation.atomic import write_atomic

        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / f"table-{number}.md", text.encode())
    return 0
