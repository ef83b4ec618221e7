"""The demo while it runs: a live table on a terminal, one plain line per event anywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from replayfleet.federation.service.words import UNKNOWN, clock, count_of, megabytes, milliseconds, percent, short_name
from replayfleet.scripts.launch.record import ClientRound, FleetRecord, Round

_MAX_CLIENT_COLUMNS = 4
_STATE_STYLES = {"training": "yellow", "uploaded": "cyan", "done": "green", "online": "green"}


def live_view(record: FleetRecord, *, elapsed_s: float, note: str = "") -> RenderableType:
    """Return what the terminal shows: where the run stands, the clients now, and all rounds so far.

    Args:
        record: what happened.
        elapsed_s: since the start of the demo.
        note: a line about what else goes on.
    """
    parts: list[RenderableType] = [Text(_headline(record, elapsed_s), style="bold")]
    if record.clients:
        parts.append(_clients_table(record))
    if any(found.num_uploads for found in record.rounds.values()):
        parts.append(rounds_table(record))
    parts += [Text(f"! {trouble}", style="red") for trouble in record.troubles[-3:]]
    if note:
        parts.append(Text(note, style="dim"))
    return Group(*parts)


def rounds_table(record: FleetRecord) -> Table:
    """Return a row per round: uploads, accuracies, sub-generators, bytes, duration; fits 80 columns for 3 clients."""
    names = record.names if len(record.names) <= _MAX_CLIENT_COLUMNS else []
    headings = ("round", "uploads", *map(short_name, names), "mean", "sub-gens", "up MB", "down MB", "time")
    table = plain_table(f"rounds: {record.measure} on all that was met so far, and what travelled", headings, left=())
    for index in sorted(record.rounds):
        if record.rounds[index].num_uploads:
            table.add_row(*_round_cells(record.rounds[index], names))
    return table


def event_line(event: Mapping[str, Any], record: FleetRecord) -> str:
    """Return one plain line about an event, or nothing if it isn't worth one; ``record`` has taken it already."""
    kind = str(event.get("event"))
    if kind in _TROUBLES:
        return f"{kind}: " + ", ".join(f"{key} {value}" for key, value in event.items() if key not in {"event", "time"})
    if kind == "upload accepted":
        return _upload_line(event, record)
    if kind == "client report":
        return _report_line(event, record)
    return _LINES.get(kind, "").format_map(
        {"device": None, "provider": None, "reason": None, "aggregate_s": 0, **event}
    )


_TROUBLES = frozenset({"upload rejected", "download refused", "download failed", "round extended", "transfer failed"})
_LINES = {
    "aggregator started": "aggregator: {method}, {num_rounds} rounds of {clients} clients",
    "round opened": "round {round}: open, {expected} uploads expected",
    "client online": "{client}: online, {device} with {provider}",
    "client gone": "{client}: gone ({reason})",
    "round committed": "round {round}: aggregated in {aggregate_s:.1f} s",
    "run finished": "run finished, rounds: {rounds}",
}


def _upload_line(event: Mapping[str, Any], record: FleetRecord) -> str:
    who, found = str(event["client"]), record.rounds[int(event["round"])]
    client = found.clients[who]
    again = ", all of classes met before" if client.known_before else ""
    what = f"{_share(client)} sub-generators{again}" if client.held else "its task model"
    return (
        f"round {found.index}: {who} uploaded {what}, {megabytes(client.bytes_up)} "
        f"({found.num_uploads} of {count_of(found.expected, 'upload')})"
    )


def _report_line(event: Mapping[str, Any], record: FleetRecord) -> str:
    who, index = str(event["client"]), int(event["round"]) - 1
    if index < 0:
        return f"{who}: serves its first model, {megabytes(record.clients[who].first_bytes)} received"
    found = record.rounds[index]
    client = found.clients[who]
    chosen = f" ({client.served})" if client.served else ""
    line = (
        f"round {index}: {who} serves v{event.get('version')}{chosen}, {record.measure} {percent(client.accuracy)} on "
        f"{client.num_test} test images, {megabytes(client.bytes_down)} down, swapped in {milliseconds(client.swap_s)}"
    )
    if found.mean_accuracy is not None:
        line += f"; mean of the fleet {percent(found.mean_accuracy)}"
    return line


def _headline(record: FleetRecord, elapsed_s: float) -> str:
    current = record.current
    if current is None:
        return f"{clock(elapsed_s)}  starting the aggregator and the clients"
    if record.finished:
        return f"{clock(elapsed_s)}  finished after {count_of(record.num_rounds, 'round')}"
    doing = "aggregating" if current.num_uploads >= current.expected else "open"
    return (
        f"{clock(elapsed_s)}  round {current.index} (of 0 to {record.num_rounds - 1}): {doing}, "
        f"{current.num_uploads} of {count_of(current.expected, 'upload')}"
    )


def plain_table(title: str, headings: Sequence[str], left: Sequence[str] = ("client", "state")) -> Table:
    """Return an empty table whose columns are numbers but for those that are named ``left``."""
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left", title_style="dim"
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return table


def _clients_table(record: FleetRecord) -> Table:
    headings = ("client", "state", "round", "serves", record.measure, "sub-gens", "up", "down", "swap")
    table = plain_table("clients now (sub-gens: sub-generators sent of those held)", headings)
    for name in record.names:
        client = record.clients[name]
        mine = [found.clients[name] for _, found in sorted(record.rounds.items()) if name in found.clients]
        table.add_row(
            name,
            Text(client.state, style=_STATE_STYLES.get(client.state, "")),
            UNKNOWN if client.round is None else str(client.round),
            f"v{client.version}" if client.version else UNKNOWN,
            percent(_newest(mine, "accuracy")),
            _share(mine[-1]) if mine else UNKNOWN,
            megabytes(_newest(mine, "bytes_up")),
            megabytes(_newest(mine, "bytes_down") or client.first_bytes or None),
            milliseconds(_newest(mine, "swap_s")),
        )
    return table


def _newest(rounds: Sequence[ClientRound], name: str) -> Any:
    """The newest known value: what is served now was measured before the round that is under way."""
    return next((getattr(found, name) for found in reversed(rounds) if getattr(found, name) is not None), None)


def _round_cells(found: Round, names: Sequence[str]) -> list[RenderableType]:
    clients = [found.clients.get(name, ClientRound()) for name in names]
    again = any(client.known_before and client.sent == 0 for client in found.clients.values())
    shares = f"{found.total('sent')} of {found.total('held')}" if found.total("held") else UNKNOWN
    return [
        str(found.index),
        f"{found.num_uploads} of {found.expected}",
        *(percent(client.accuracy) for client in clients),
        Text(percent(found.mean_accuracy), style="bold"),
        Text(shares, style="bold green" if again else ""),
        f"{found.total('bytes_up') / 1e6:.1f}",
        f"{found.total('bytes_down') / 1e6:.1f}" if found.total("bytes_down") else UNKNOWN,
        UNKNOWN if found.round_s is None else f"{found.round_s:.0f} s",
    ]


def _share(client: ClientRound) -> str:
    return f"{client.sent} of {client.held}" if client.sent is not None and client.held else UNKNOWN
