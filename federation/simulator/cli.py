"""``fleet-sim METHOD``: run one method over one stream, and write ``result.json``, ``accuracy.png`` and ``losses.png``.

``fleet-sim table`` runs whole tables of the papers: ``federation.simulator.tables.command``.

Torch, NumPy and the methods are imported when a run begins, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from replayfleet.federation.errors import NothingLearned
from replayfleet.federation.help_groups import HELP, GroupedCommand
from replayfleet.federation.imports import without_collections
from replayfleet.federation.service.command import explained, with_settings
from replayfleet.federation.simulator.exit_codes import UNFINISHED
from replayfleet.federation.simulator.run_spec import FROM_STDIN, RunSpec

_TABLE = "table"
_PATIENCE_S = 1.0
"""For threads that have nothing to do any more."""


def _list_methods(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    from replayfleet.federation.methods import ALL_METHODS
    from replayfleet.federation.service.fleet.variants import VARIANTS

    for name in sorted(ALL_METHODS):
        click.echo(name)
    for name, (method, settings) in sorted(VARIANTS.items()):
        click.echo(f"{name}  ({' '.join([method, *(f'--set {key}={text}' for key, text in settings.items())])})")
    context.exit()


@click.command(cls=GroupedCommand, context_settings=HELP)
@click.version_option(package_name="replayfleet")
@click.argument("method")
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_methods,
    help="Show the methods, and exit.",
)
@with_settings(RunSpec)
def fleet_sim(spec: RunSpec) -> None:
    """Simulate METHOD (pfedgrp, fedavg, ...: --list shows all) on a fleet whose clients learn from streams.

    To run a whole table of the papers: fleet-sim table --help.
    """
    run(spec, [Path(sys.argv[0]).name, *sys.argv[1:]])


def run(spec: RunSpec, command: list[str]) -> None:
    """Make a run and print it round by round; ``command`` is noted with its result.

    Raises:
        SettingsError: It can't be made; nothing was written.
        NothingLearned: Every upload of every round was left out; the result was written.
        SystemExit: With ``UNFINISHED``, when its minutes are over.
    """
    spec.check()
    from replayfleet.federation.service.logs import configure_logging
    from replayfleet.federation.service.torch_setup import leave_the_compiler_out, let_idle_threads_sleep

    configure_logging(level="WARNING")
    let_idle_threads_sleep()
    with without_collections():
        leave_the_compiler_out()
        from replayfleet.federation.simulator.job import prepare
    from replayfleet.federation.service.fleet.spec import tell_what_is_idle
    from replayfleet.federation.simulator.progress import Progress
    from replayfleet.federation.streams.stream import DRIVING

    job = prepare(spec, command)
    stream = job.simulation.stream
    size = stream.settings
    progress = Progress(stream.num_rounds, size.num_clients, num_absent=size.num_absent, measure=job.measure)
    tell_what_is_idle(job.simulation.method, spec.changes())
    click.echo(job.headline)
    result = job.run(on_round=progress.round_done, on_client=progress.client_begins)
    if result is None:
        click.echo(f"stopped: {spec.minutes:g} minutes leave no time for more; the same command with --resume goes on")
        sys.exit(UNFINISHED)
    summary = result.summary
    regret = f", average regret {100 * summary['average_regret']:.2f}" if "average_regret" in summary else ""
    kept = f", kept {100 * summary['earlier_kept']:.1f} % of the earlier towns" if "earlier_kept" in summary else ""
    what = "town" if spec.scenario == DRIVING else "task"
    diverged = "" if progress.diverged is None else f"; DIVERGED in round {progress.diverged}"
    towns = f" ({100 * summary['place_accuracy']:.2f} % per {what})" if "place_accuracy" in summary else ""
    charts = ", accuracy.png and losses.png" if (spec.out / "losses.png").exists() else " and accuracy.png"
    click.echo(
        f"final {job.measure} {100 * summary['final_accuracy']:.2f} %{towns}, "
        f"average {100 * summary['average_accuracy']:.2f} %{regret}{kept}, "
        f"forgetting {100 * summary['average_forgetting']:.2f}; "
        f"{summary['sub_generator_updates']:.1f} sub-generator updates per client; "
        f"wrote {spec.out / 'result.json'}{charts}{diverged}"
    )
    uploads = [client.quarantined for record in result.rounds for client in record.clients.values() if client.present]
    if uploads and all(uploads):
        raise NothingLearned(f"every upload of every round was left out, so nobody learned anything: {uploads[-1]}")


def main() -> None:
    """Run the command; every expected error becomes one line on stderr; exit code 2 for settings, 1 for the rest."""
    given = sys.argv[1:]
    is_table = given[:1] == [_TABLE]
    try:
        if given == [FROM_STDIN]:
            spec = RunSpec.decode(sys.stdin.buffer.read())
            code = None
            run(spec, spec.command())
        elif is_table:
            from replayfleet.federation.simulator.tables.command import table

            code = table.main(given[1:], prog_name=f"fleet-sim {_TABLE}", standalone_mode=False)
        else:
            code = fleet_sim.main(standalone_mode=False)
    except click.Abort:
        how = "the same command" if is_table else "--resume"
        click.echo(f"fleet-sim: stopped; {how} continues after the last complete round", err=True)
        _leave(130)
    except Exception as error:
        text, wrong = explained(f"fleet-sim {_TABLE}" if is_table else "fleet-sim", error)
        click.echo(f"fleet-sim: {' '.join(text.split())}", err=True)
        _leave(wrong)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(code: int) -> NoReturn:
    """End with ``code``, not waiting for clients that are in a local round; what is complete is on disk."""
    threads = sys.modules.get("replayfleet.federation.simulator.client_threads")
    try:
        at_once = threads is not None and threads.still_training(_PATIENCE_S)
    except KeyboardInterrupt:  # who pressed Ctrl-C again doesn't want to wait
        at_once = True
    if at_once:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
