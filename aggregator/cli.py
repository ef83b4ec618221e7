"""``aggregator``: serve a fleet, and look at a run.

Torch is imported when a run begins, so that ``--help`` and mistakes are answered at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import click

from replayfleet.aggregator.console.command import console, token
from replayfleet.aggregator.control.command import COMMANDS
from replayfleet.aggregator.control.listing import clients, history
from replayfleet.aggregator.members.command import enroll, renew, revoke
from replayfleet.aggregator.settings import AggregatorSettings
from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.help_groups import HELP, Program
from replayfleet.federation.imports import without_collections
from replayfleet.federation.paths import ANY_PATH
from replayfleet.federation.service.command import ASKS, agreed, run_command, say, with_settings
from replayfleet.federation.service.words import count_of, visible


@click.group(cls=Program, context_settings=HELP)
@click.version_option(package_name="replayfleet")
def cli() -> None:
    """Aggregate what a fleet of cameras learns, and give every camera its own model."""


@cli.command()
@with_settings(AggregatorSettings, file="aggregator.toml")
def serve(settings: AggregatorSettings) -> None:
    """Run a fleet's aggregator; with --rounds it exits 0 after the last one."""
    from replayfleet.federation.service.logs import configure_logging
    from replayfleet.federation.service.torch_setup import let_idle_threads_sleep

    let_idle_threads_sleep()
    configure_logging(as_json=settings.json_logs)
    settings.task_spec()
    with without_collections():
        from replayfleet.aggregator.serve import serve as run

    if run(settings):
        return
    if settings.rounds is not None:
        raise ReplayfleetError("stopped before the last round; the same command goes on where it was")
    say("aggregator", "stopped; the same command goes on where it was")


@cli.command()
@click.option("--data-dir", type=ANY_PATH, required=True, help="The data dir of `aggregator serve`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(data_dir: Path, as_json: bool) -> None:
    """Show the round, its uploads and every client's download, and what a running aggregator waits for."""
    from replayfleet.aggregator.control.listing import current_waits
    from replayfleet.aggregator.control.verbs import VerbRefused
    from replayfleet.aggregator.operator.status import read_status

    found, silent = read_status(data_dir), ""
    try:
        waits = current_waits(data_dir)
    except VerbRefused as error:
        waits, silent = (), str(error)
    if as_json:
        told = None if waits is None or silent else [dataclasses.asdict(wait) for wait in waits]
        click.echo(json.dumps({**dataclasses.asdict(found), "running": waits is not None, "waits": told}, indent=1))
        return
    lines = [f"{wait.reason.value}: {wait.text}" for wait in waits or ()]
    lines += ["no aggregator runs"] if waits is None else [f"one runs, and doesn't answer: {silent}"] * bool(silent)
    click.echo("\n".join([*found.lines(), *map(visible, lines)]))


@cli.command()
@click.argument("folder", type=ANY_PATH, metavar="DIR")
@click.option("--data-dir", type=ANY_PATH, required=True, help="The data dir of `aggregator serve`.")
def backup(folder: Path, data_dir: Path) -> None:
    """Copy the data dir to the new folder DIR, keys included, also while the aggregator runs."""
    from replayfleet.aggregator.operator.backup import back_up

    made = back_up(data_dir, folder)
    click.echo(f"backup of fleet {made.fleet} in round {made.round}, {count_of(made.num_blobs, 'blob')}: {made.folder}")


@cli.command()
@click.argument("backup", type=ANY_PATH)
@click.option("--data-dir", type=ANY_PATH, required=True, help="What `aggregator serve` gets then.")
@click.option("--replace", is_flag=True, help="Move what is in the data dir aside; without it, it has to be empty.")
@click.option(
    "--as-spare", is_flag=True, help="Stand by while another aggregator leads, and take over when it is gone."
)
def restore(backup: Path, data_dir: Path, *, replace: bool, as_spare: bool) -> None:
    """Make a data dir from BACKUP. Clients that went on since then come back to its round by themselves."""
    from replayfleet.aggregator.operator.backup import restore as make

    made = make(backup, data_dir, replace=replace, as_spare=as_spare)
    then = "it stands by while another one leads" if as_spare else "the clients go on from there"
    click.echo(
        f"fleet {made.fleet} restored to round {made.round}, in epoch {made.epoch}: {made.folder}; "
        f"start `aggregator serve` as before, {then}"
    )
    if made.keeps_keys:
        click.echo("its keys are those of what it replaces: they were replaced since the backup, and clients know that")
    if made.revoked_since:
        click.echo(f"revoked since the backup, and members again: {', '.join(made.revoked_since)}; revoke them again")


@cli.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--data-dir", type=ANY_PATH, required=True, help="The data dir of `aggregator serve`.")
@ASKS[0]
@ASKS[1]
def add_class(names: tuple[str, ...], data_dir: Path, *, yes: bool, dry_run: bool) -> None:
    """Let the fleet learn the classes NAME too, beside those that it began with.

    A running aggregator begins anew with them by itself; one that is stopped has them at its next start. Devices serve
    on meanwhile, keep what they have learned, and follow by themselves. For classifiers.
    """
    from replayfleet.aggregator.control.caller import LocalControl
    from replayfleet.aggregator.control.growing import add_classes, wait_until_known
    from replayfleet.aggregator.records.deeds import who_is

    who, at, control = who_is(os.getpid(), os.getuid()), time.time(), LocalControl(data_dir)
    try:
        text, runs = control.add_classes(names, only_plan=True).text, True
    except ConnectionError:
        text, runs = add_classes(data_dir, names, who, at, only_plan=True).text, False
    if not agreed(text, yes=yes, dry_run=dry_run):
        return
    if runs:
        control.add_classes(names)
        wait_until_known(data_dir, names)
        click.echo("done; the aggregator goes on with them")
        return
    add_classes(data_dir, names, who, at)
    click.echo("done; start `aggregator serve` as before")


@cli.command()
@click.option("--data-dir", type=ANY_PATH, required=True, help="The data dir of `aggregator serve`.")
@click.option("--root-key", type=ANY_PATH, help="The fleet's root key, if not in the data dir.")
@click.option("--new-root-key", is_flag=True, help="Replace the root key as well.")
def rotate_key(data_dir: Path, root_key: Path | None, new_root_key: bool) -> None:
    """Replace the key with which the aggregator signs; the former one counts for nothing then."""
    from replayfleet.aggregator.trust.release import rotate_key as rotate
    from replayfleet.federation.service.credentials.keys import KEYS
    from replayfleet.federation.service.data_dir import aggregators, read_owner
    from replayfleet.federation.wire.protocol.limits import MAX_ROOTS

    read_owner(data_dir, aggregators(None))
    version = rotate(data_dir / KEYS, root_key, new_root_key=new_root_key)
    click.echo(f"root {version} names a new key; start the aggregator again, and its clients follow by themselves")
    if version > MAX_ROOTS + 1:
        last = version - MAX_ROOTS - 1
        click.echo(f"but for those that heard of none after root {last}: they need the new root.json")
    click.echo("backups and spares have the former key: take a new backup, and make spares from it")


for command in (enroll, renew, revoke, clients, history, *COMMANDS, console, token):
    cli.add_command(command)


def main() -> None:
    """Run the command; every expected error is one line on stderr: exit code 2 for settings, 1 for the rest."""
    run_command(cli, "aggregator")
