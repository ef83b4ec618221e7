"""``aggregator exclude``, ``readmit``, ``pause``, ``resume``, ``drain``, ``rollback`` and ``round``.

Each says what will happen, asks, and does it on the aggregator that runs on the data dir. Where none runs, a client is
excluded or readmitted in its store.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replayfleet.aggregator.control.caller import LocalControl
from replayfleet.aggregator.control.membership import Plan, excluding, known, readmitting
from replayfleet.aggregator.control.verbs import (
    CloseRound,
    Drain,
    Exclude,
    ExtendRound,
    OpenRound,
    Pause,
    Readmit,
    Resume,
    RollBack,
    Verb,
    VerbRefused,
    check_verb,
    client_of,
    name_of,
    parse_version,
    reason_of,
)
from replayfleet.federation.errors import MalformedMessage, SettingsError
from replayfleet.federation.help_groups import HELP, GroupedCommand, Program
from replayfleet.federation.paths import FOLDER
from replayfleet.federation.service.command import ASKS, agreed
from replayfleet.federation.service.words import visible

if TYPE_CHECKING:
    from replayfleet.aggregator.store import AggregatorStore

DATA_DIR = click.option("--data-dir", type=FOLDER, required=True, help="The data dir of `aggregator serve`.")


def _verb(**words: Any) -> Callable[[Callable[..., Verb]], click.Command]:
    """Make a command of what returns a verb."""

    def decorate(function: Callable[..., Verb]) -> click.Command:
        @functools.wraps(function)
        def run(data_dir: Path, yes: bool, dry_run: bool, **values: Any) -> None:
            try:
                verb = check_verb(function(**values))
            except MalformedMessage as error:
                raise SettingsError(str(error)) from error
            perform(verb, data_dir, yes=yes, dry_run=dry_run)

        made: Callable[..., None] = run
        for option in reversed((DATA_DIR, *ASKS)):
            made = option(made)
        return click.command(cls=GroupedCommand, **words)(made)

    return decorate


def perform(verb: Verb, data_dir: Path, *, yes: bool, dry_run: bool) -> None:
    """Say what a verb will do, ask unless ``yes``, and do that; if the fleet changed meanwhile, all of it anew.

    Raises:
        SettingsError: There is no aggregator's store, or nobody to ask.
        VerbRefused: It can't be done; nothing was changed.
    """
    shown, refusal = "", VerbRefused()
    while True:
        with _reached(verb, data_dir) as (plan, do):
            if plan.mark == shown:
                raise refusal
            if shown:
                click.echo("the fleet has changed meanwhile, and nothing was done; now:")
            if not agreed(plan.text, yes=yes, dry_run=dry_run):
                return
            try:
                do()
                break
            except VerbRefused as error:
                shown, refusal = plan.mark, error
    click.echo("done" + (f"; `{visible(plan.undo)}` takes it back" if plan.undo else ""))


@contextlib.contextmanager
def _reached(verb: Verb, data_dir: Path) -> Iterator[tuple[Plan, Callable[[], Plan]]]:
    """Yield what a verb would do, and what does it: the running aggregator, or the store that none uses."""
    control = LocalControl(data_dir)
    try:
        plan = control.plan(verb)
    except ConnectionError as error:
        if not isinstance(verb, (Exclude, Readmit)):
            raise VerbRefused(f"{error}; start it, for `{name_of(verb)}` is about what it does") from error
        with _stored(data_dir) as store:
            yield _offline_plan(store, verb), lambda: _do_offline(store, verb)
        return
    yield plan, lambda: control.do(verb, agreed=plan.mark)


@contextlib.contextmanager
def _stored(data_dir: Path) -> Iterator[AggregatorStore]:
    """Yield the store of a data dir on which no aggregator runs, and let none begin meanwhile."""
    from replayfleet.aggregator.store import DATABASE, AggregatorStore
    from replayfleet.federation.service.data_dir import claim_data_dir, fleet_of

    if not (data_dir / DATABASE).is_file():
        raise SettingsError(f"data dir {data_dir}: no aggregator has run here; expected {DATABASE}")
    with (
        claim_data_dir(data_dir, fleet=fleet_of(data_dir, None), role="aggregator"),
        contextlib.closing(AggregatorStore(data_dir)) as store,
    ):
        yield store


def _offline_plan(store: AggregatorStore, verb: Exclude | Readmit) -> Plan:
    standing = known(verb.client, store.roll.refresh())
    plan = excluding(standing) if isinstance(verb, Exclude) else readmitting(standing)
    return Plan(f"{plan.text.rstrip('.')} (no aggregator runs here now; the next start knows)", plan.undo)


def _do_offline(store: AggregatorStore, verb: Exclude | Readmit) -> Plan:
    from replayfleet.aggregator.records.deeds import Deed, who_is
    from replayfleet.aggregator.records.roll import Exclusion

    plan, who = _offline_plan(store, verb), who_is(os.getpid(), os.getuid())
    deed = Deed(time.time(), who, name_of(verb), client_of(verb), plan.text + reason_of(verb))
    with store.doing(deed):
        if isinstance(verb, Exclude):
            store.exclude(verb.client, Exclusion(deed.at, who, verb.because))
        else:
            store.roll.readmit(verb.client)
    return plan


@_verb()
@click.argument("client")
@click.option("--because", default="", help="Why, for whoever looks next.")
def exclude(client: str, because: str) -> Verb:
    """Let CLIENT take no part in rounds any more, until it is readmitted; it goes on serving what it has.

    The name stays excluded over restarts, connections and new certificates. `aggregator revoke` shuts a device out.
    """
    return Exclude(client, because)


@_verb()
@click.argument("client")
def readmit(client: str) -> Verb:
    """Let an excluded CLIENT take part again."""
    return Readmit(client)


@_verb()
def pause() -> Verb:
    """Let nobody begin to train; the open round stays open, and its deadline stands still."""
    return Pause()


@_verb()
def resume() -> Verb:
    """Let rounds go on after a pause."""
    return Resume()


@_verb()
def drain() -> Verb:
    """Let the open round end as usual, then pause."""
    return Drain()


@_verb()
@click.argument("client", metavar="CLIENT|all")
@click.option("--to", metavar="VERSION", help="A version that is still kept.  [default: the one before]")
def rollback(client: str, to: str | None) -> Verb:
    """Let CLIENT, or all, serve an earlier version of its models again, as a new version.

    The content before the present one is kept, and one more. The next round's models follow as usual; `aggregator
    pause` keeps them back.
    """
    return RollBack(client, None if to is None else parse_version(to))


@click.group("round", cls=Program, context_settings=HELP)
def round_group() -> None:
    """Open, close or extend a round."""


@_verb(name="close")
def close_round() -> Verb:
    """Close the open round with the uploads that it has."""
    return CloseRound()


@_verb(name="extend")
@click.option("--by-s", type=float, help="How much later its deadline comes, in seconds.  [default: --deadline-s]")
def extend_round(by_s: float | None) -> Verb:
    """Give the open round more time."""
    return ExtendRound(by_s)


@_verb(name="open")
def open_round() -> Verb:
    """Begin the round that waits, whatever it waits for (`aggregator serve --open-rounds`, `--round-interval-s`)."""
    return OpenRound()


round_group.add_command(open_round)
round_group.add_command(close_round)
round_group.add_command(extend_round)
COMMANDS = (exclude, readmit, pause, resume, drain, rollback, round_group)
