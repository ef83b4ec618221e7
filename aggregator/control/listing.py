"""``aggregator clients`` and ``history``: who belongs to the fleet, why each is waited for, and what happened."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from replayfleet.aggregator.control.caller import LocalControl
from replayfleet.aggregator.control.command import DATA_DIR
from replayfleet.aggregator.control.verbs import VerbRefused
from replayfleet.aggregator.control.waits import outside
from replayfleet.aggregator.members.command import day, what_to_copy
from replayfleet.devices.profiles import FP32
from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.help_groups import GroupedCommand
from replayfleet.federation.service.words import count_of, visible
from replayfleet.federation.wire.protocol.messages import spoken

if TYPE_CHECKING:
    from replayfleet.aggregator.control.view import MemberView
    from replayfleet.aggregator.members.table import Member
    from replayfleet.aggregator.records.deeds import Deed
    from replayfleet.aggregator.records.roll import Standing
    from replayfleet.federation.service.waits import Wait

_SHOWING = ("last", "client", "deeds", "as_json")
"""What ``history`` takes that says which events are shown, and how."""
_HIDDEN = frozenset({"time", "event", "spec", "weights", "counters", "facts", "metrics"})


@click.command(cls=GroupedCommand)
@DATA_DIR
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def clients(data_dir: Path, as_json: bool) -> None:
    """List the fleet's members, what each is waited for, and until when its certificate counts.

    Also brings what the broker gets up to date, if anybody was enrolled.
    """
    rows = _rows(data_dir, time.time())
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        click.echo("nobody has come yet, and nobody was enrolled")
        return
    shown = [{key: visible(text) for key, text in _shown(row).items()} for row in rows]
    widths = {key: max(len(key), *(len(row[key]) for row in shown)) for key in shown[0]}
    for line in [{key: key for key in widths}, *shown]:
        click.echo("  ".join(line[key].ljust(width) for key, width in widths.items()).rstrip())


@click.command(cls=GroupedCommand)
@DATA_DIR
@click.option("--last", type=click.IntRange(1), default=50, show_default=True, help="So many events, the newest last.")
@click.option("--client", help="Only what is about this client.")
@click.option("--deeds", is_flag=True, help="Only what operators did.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one event a line.")
@click.option("--export", "viewer", type=click.Choice(["tensorboard", "mlflow"]), help="Write curves by round for it.")
@click.option("--to", metavar="PLACE", help="Where --export writes: a folder, or the URL of MLflow's tracking server.")
def history(  # one for each option
    data_dir: Path,
    last: int,
    client: str | None,
    deeds: bool,
    as_json: bool,
    viewer: str | None,
    to: str | None,
) -> None:
    """Show what happened, from the journal, also while the aggregator runs, and what operators did since it ended.

    With --export all its numbers go to a viewer: times and counts of each round, and what every client reported. A
    later export adds what happened since, and nothing is shown twice.
    """
    from replayfleet.aggregator.operator.journal import JOURNAL, read_journal
    from replayfleet.aggregator.store import DATABASE
    from replayfleet.federation.service.data_dir import aggregators, fleet_of, read_owner

    if not (data_dir / JOURNAL).is_file() and not (data_dir / DATABASE).is_file():
        raise SettingsError(f"data dir {data_dir}: no aggregator has run here; expected {JOURNAL}")
    read_owner(data_dir, aggregators(None))
    if (viewer is None) != (to is None):
        raise SettingsError("--export and --to belong together; expected for example --export tensorboard --to curves")
    if viewer is not None and to is not None:
        context = click.get_current_context()
        if said := [name for name in _SHOWING if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]:
            raise SettingsError(f"--export writes everything; leave out --{said[0].removeprefix('as_')}")
        from replayfleet.aggregator.control.curves import export

        number = export(read_journal(data_dir), fleet_of(data_dir, None), viewer, to, _founded(data_dir))
        click.echo(f"{count_of(number, 'number')} for {viewer} in {to}")
        return
    wanted = (
        event
        for event in _happened(data_dir)
        if client in {None, event.get("client")} and not (deeds and event.get("event") != "operator")
    )
    shown = deque(wanted, maxlen=last)
    if not shown:
        about = (
            "" if client is None else f" of client {visible(client)}, whom `aggregator clients` lists if it is a member"
        )
        click.echo(f"the journal has {'no deed' if deeds else 'no event'}{about}", err=True)
    for event in shown:
        click.echo(json.dumps(event) if as_json else visible(_line(event)))


def _founded(data_dir: Path) -> str:
    """Return when the fleet began, which its journal forgets; empty if its store doesn't say."""
    from replayfleet.aggregator.store import AggregatorStore

    try:
        with contextlib.closing(AggregatorStore(data_dir, read_only=True)) as store:
            return str(store.founded_at() or "")
    except (ReplayfleetError, sqlite3.Error):
        return ""


def _happened(data_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the journal's events, and the deeds that it has forgotten, or will be told at the next start."""
    from replayfleet.aggregator.operator.journal import read_journal
    from replayfleet.aggregator.store import AggregatorStore

    kept: tuple[Deed, ...] = ()
    untold: tuple[Deed, ...] = ()
    try:
        with contextlib.closing(AggregatorStore(data_dir, read_only=True)) as store:
            kept, untold = store.deeds.kept(), store.deeds.untold()
    except (ReplayfleetError, sqlite3.Error):
        pass  # the journal tells what it knows beside a damaged database too
    known = {event.get("deed") for event in read_journal(data_dir, "operator")} if kept else set()
    yield from (_as_event(deed) for deed in kept if deed.number not in known and deed not in untold)
    for event in read_journal(data_dir):
        known.add(event.get("deed"))  # one may come meanwhile
        yield event
    yield from (_as_event(deed) for deed in untold if deed.number not in known)


def _as_event(deed: Deed) -> dict[str, Any]:
    return {"time": deed.at, "event": "operator", **deed.event}


def current_waits(data_dir: Path) -> tuple[Wait, ...] | None:
    """Return what the aggregator on a data dir waits for; None if none runs there.

    Raises:
        VerbRefused: One does, and doesn't answer.
    """
    try:
        return LocalControl(data_dir).look().waits
    except ConnectionError:
        return None


def _rows(data_dir: Path, now: float) -> list[dict[str, Any]]:
    """Return what is known of everybody: certificates, the store's word, and that of the aggregator if it runs."""
    from replayfleet.aggregator.members.authority import CA_CERTIFICATE
    from replayfleet.aggregator.members.enrolment import BROKER, MEMBERS, opened
    from replayfleet.aggregator.store import DATABASE, AggregatorStore

    enrolled: dict[str, Member] = {}
    if (data_dir / MEMBERS / CA_CERTIFICATE).is_file():
        with opened(data_dir) as registry:
            enrolled = {member.client: member for member in registry.members()}
            if registry.broker_changed:  # a certificate that ended, or the broker's own, which soon does
                click.echo(f"broker: what it gets is new: {what_to_copy(data_dir / BROKER)}; then reload it", err=True)
    elif not (data_dir / DATABASE).is_file():
        raise SettingsError(f"data dir {data_dir}: nobody was enrolled here, and no aggregator has run; expected one")
    try:
        views = {view.client: view for view in LocalControl(data_dir).look().members}
    except (ConnectionError, VerbRefused):  # the store says what it knows
        views = {}
    with contextlib.closing(AggregatorStore(data_dir, read_only=True)) as store:
        standings = store.roll.refresh()
    names = sorted(enrolled.keys() | standings.keys())
    return [_row(standings[name], enrolled.get(name), views.get(name), now) for name in names if name in standings]


def _row(standing: Standing, member: Member | None, view: MemberView | None, now: float) -> dict[str, Any]:
    valid = [each for each in member.certificates if each.ends_at > now] if member else []
    until = "" if member is None else day(member.revoked_at or member.certificates[0].ends_at)
    former = [each.ends_at for each in valid if member and each is not member.certificates[0]]
    note = f"a former certificate counts until {day(max(former))}" if former else ""
    if member is not None and member.revoked_at is None and not valid:
        state = "expired"
    elif standing.revoked_at is not None:
        state = "revoked"
    elif standing.exclusion is not None:
        state = "excluded"
    elif not standing.trains:
        state = "serves only"
    else:
        state = "not enrolled" if member is None else "member"
    wait = view.wait if view is not None else outside(standing)
    seen_at = standing.seen_at if view is None else view.seen_at
    return {
        "client": standing.client,
        "state": state,
        "trains": standing.trains,
        "live": None if view is None else view.live,
        "seen": "" if seen_at is None else _moment(seen_at),
        "version": standing.version,
        "confirmed_version": standing.confirmed_version,
        "serving_version": None if view is None else view.serving_version,
        "precision": None if view is None else view.precision,
        "notice": None if view is None else view.notice,
        "phase": None if view is None else view.phase,
        "labels_waiting": None if view is None or view.labels_waiting < 0 else view.labels_waiting,
        "camera_age_s": None if view is None or view.picture_age_s < 0 else view.picture_age_s,
        "excluded_by": None if standing.exclusion is None else standing.exclusion.by,
        "waits": None if wait is None else wait.reason,
        "why": "" if wait is None else wait.text,
        "until": until,
        "note": note,
    }


def _shown(row: dict[str, Any]) -> dict[str, str]:
    """Return what fits into a line."""
    live = {True: "now", False: row["seen"], None: row["seen"]}[row["live"]]
    why = "; ".join(filter(None, (row["why"], row["note"])))
    version = spoken(row["confirmed_version"]) if row["confirmed_version"] else ""
    if row["precision"] not in {None, FP32}:
        version += f" {row['precision']}"
    return {
        "client": row["client"],
        "state": row["state"],
        "seen": live,
        "version": version,
        "until": row["until"],
        "note": why,
    }


def _line(event: dict[str, Any]) -> str:
    words = [f"{key}={value}" for key, value in event.items() if key not in _HIDDEN and value not in ("", None)]
    at = event.get("time")
    moment = _moment(float(at)) if isinstance(at, (int, float)) else "?"
    return " ".join([moment, str(event.get("event")), *words])


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
