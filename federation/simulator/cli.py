"""``fleet-sim METHOD``: run one method over one stream, and write ``result.json`` and ``accuracy.png``.

``fleet-sim table`` runs whole tables of the papers: ``federation.simulator.tables.command``.

Torch, NumPy and the methods are imported when a run begins, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from replayfleet.federation.errors import ReplayfleetError, SettingsError, nearest
from replayfleet.federation.simulator.exit_codes import UNFINISHED

if TYPE_CHECKING:
    from replayfleet.federation.simulator.job import Job

_SAMPLERS = ("eager", "onnx")
_TABLE = "table"
_PATIENCE_S = 1.0
"""For threads that have nothing to do any more."""


def _list_methods(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    from replayfleet.federation.methods import METHODS
    from replayfleet.federation.service.variants import VARIANTS

    for name in sorted(METHODS):
        click.echo(name)
    for name, (method, settings) in sorted(VARIANTS.items()):
        click.echo(f"{name}  ({' '.join([method, *(f'--set {key}={text}' for key, text in settings.items())])})")
    context.exit()


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
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
@click.option("--scenario", default="circulating", help="What comes when: gradual, circulating, extreme, driving.")
@click.option(
    "--dataset",
    default="fashion-mnist",
    help=(
        "fashion-mnist, mnist, emnist-byclass, cifar-10, cifar-100, imagenet-10, tinyimagenet-100, carla-crops, "
        "carla-boxes (with --scenario driving), or folder."
    ),
)
@click.option("--settings", "preset", default="small", help="Stream size and method: paper, small, demo, tiny.")
@click.option("--clients", type=int, help="Number of clients.  [default: of the settings]")
@click.option("--rounds", type=int, help="Number of rounds.  [default: of the settings]")
@click.option("--overlap", type=int, help="Classes that adjacent task types of a client share.  [default: 0]")
@click.option("--absent", type=int, help="Clients that miss a round, drawn anew for each but the first.  [default: 0]")
@click.option("--seed", type=int, default=0, help="Of the stream, the models and the training.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the results.")
@click.option("--data-root", type=click.Path(path_type=Path), help="Folder of data sets; else $REPLAYFLEET_DATA.")
@click.option("--download", is_flag=True, help="Let torchvision fetch a data set that is not found.")
@click.option("--image-size", type=int, help="Side in pixels, for --dataset folder: 32 or 64.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting; repeatable.")
@click.option("--threads", type=int, default=1, help="Of one operation; results depend on it.")
@click.option(
    "--workers",
    type=int,
    help="Clients that train at the same time; results don't depend on it.  [default: cores / threads; 1 on a GPU]",
)
@click.option("--torch-device", default="cpu", help="Where methods compute: cpu, cuda, cuda:1, ...")
@click.option(
    "--in-step/--one-by-one",
    default=None,
    help="Train what clients ask for at the same time as one network.  [default: in step on a GPU only]",
)
@click.option("--minutes", type=float, help="Begin no round, after the first, that would end later; --resume goes on.")
@click.option("--sampler", default="eager", help="What runs sub-generators: eager (PyTorch) or onnx (as on a device).")
@click.option(
    "--compare",
    type=click.Path(path_type=Path),
    multiple=True,
    help="result.json of another run on the same stream, for the chart; centralized's gives the regret. Repeatable.",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted run in --out.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier run in --out.")
def fleet_sim(**options: Any) -> None:
    """Simulate METHOD (pfedgrp, fedavg, ...: --list shows all) on a fleet whose clients learn from streams.

    To run a whole table of the papers: fleet-sim table --help.
    """
    if options["sampler"] not in _SAMPLERS:
        raise SettingsError(f"unknown sampler {options['sampler']!r}{nearest(options['sampler'], _SAMPLERS)}")
    if options["threads"] < 1:
        raise SettingsError(f"--threads is {options['threads']}, expected at least 1")
    if options["workers"] is not None and options["workers"] < 1:
        raise SettingsError(f"--workers is {options['workers']}, expected at least 1")
    if options["minutes"] is not None and not options["minutes"] >= 0:
        raise SettingsError(f"--minutes is {options['minutes']:g}, expected 0 or more")
    from replayfleet.federation.service.torch_setup import let_idle_threads_sleep

    let_idle_threads_sleep()
    from replayfleet.federation.simulator.job import Options, prepare

    _run(prepare(Options(**options), command=[Path(sys.argv[0]).name, *sys.argv[1:]]))


def main() -> None:
    """Run the command; every expected error becomes one line on stderr and exit code 2."""
    is_table = sys.argv[1:2] == [_TABLE]
    try:
        code = _table_command(sys.argv[2:]) if is_table else fleet_sim.main(standalone_mode=False)
    except ReplayfleetError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        _fail(f"{error}; install replayfleet[cpu] or replayfleet[cuda], on a Jetson the vendor's build")
    except click.ClickException as error:
        _fail(f"{error.format_message()} (fleet-sim {f'{_TABLE} ' if is_table else ''}--help lists all options)")
    except click.Abort:
        how = "the same command" if is_table else "--resume"
        click.echo(f"fleet-sim: stopped; {how} continues after the last complete round", err=True)
        _leave(130)
    sys.exit(code if isinstance(code, int) else 0)


def _table_command(arguments: list[str]) -> Any:
    from replayfleet.federation.simulator.tables.command import table

    return table.main(arguments, prog_name=f"fleet-sim {_TABLE}", standalone_mode=False)


def _fail(message: str) -> NoReturn:
    click.echo(f"fleet-sim: {' '.join(message.split())}", err=True)
    _leave(2)


def _leave(code: int) -> NoReturn:
    """End with ``code``, not waiting for clients that are in a local round; what is complete is on disk."""
    threads = sys.modules.get("replayfleet.federation.simulator.client_threads")
    if threads is not None and threads.still_training(_PATIENCE_S):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(job: Job) -> None:
    from replayfleet.federation.simulator.progress import Progress

    stream = job.simulation.stream
    size = stream.settings
    progress = Progress(stream.num_rounds, size.num_clients, num_absent=size.num_absent, measure=job.measure)
    click.echo(job.headline)
    result = job.run(on_round=progress.round_done, on_client=progress.client_begins)
    if result is None:
        click.echo(f"stopped: {job.minutes:g} minutes leave no time for more; the same command with --resume goes on")
        sys.exit(UNFINISHED)
    summary = result.summary
    regret = f", average regret {100 * summary['average_regret']:.2f}" if "average_regret" in summary else ""
    kept = f", kept {100 * summary['earlier_kept']:.1f} % of the earlier towns" if "earlier_kept" in summary else ""
    towns = f" ({100 * summary['place_accuracy']:.2f} % per town)" if "place_accuracy" in summary else ""
    click.echo(
        f"final {job.measure} {100 * summary['final_accuracy']:.2f} %{towns}, "
        f"average {100 * summary['average_accuracy']:.2f} %{regret}{kept}, "
        f"forgetting {100 * summary['average_forgetting']:.2f}; "
        f"{summary['sub_generator_updates']:.1f} sub-generator updates per client; "
        f"wrote {job.out / 'result.json'} and accuracy.png"
    )
