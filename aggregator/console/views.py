"""The pages: what a template is told, decided from facts alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote, urlencode

from markupsafe import Markup

from replayfleet.aggregator.console.charts import Chart, Charts
from replayfleet.aggregator.console.facts import Fleet, Member
from replayfleet.aggregator.console.story import MAX_EVENTS, TROUBLES, ClientStory, RoundStory, Story
from replayfleet.federation.service import words

NUM_ROUNDS = 60
"""That charts show; each dot is an element of the page."""
MAX_LINES = 12
"""Clients, or places of one, drawn one by one; of more, the mean, the lowest and the highest."""
MAX_MATRIX, MAX_NUMBERS, MAX_NEAREST = 60, 16, 6
"""Clients of a matrix, those of one whose cells have room for numbers, and of larger fleets the nearest of each."""
MAX_ROOMY = 8
"""Names that get a line each."""
SHOWS = (
    ("", "all"),
    ("waits", "waited for"),
    ("trouble", "with trouble"),
    ("offline", "not online"),
)
_SHOWN = {
    "waits": lambda member: member.is_awaited,
    "trouble": lambda member: member.num_troubles > 0,
    "offline": lambda member: member.state != "online",
}
MEASURES = {"accuracy": "Accuracy", "boxes_found": "Boxes found"}
"""What clients report of their held-out samples, and what it is called."""
BUTTONS = {
    "exclude": "Exclude",
    "readmit": "Readmit",
    "rollback": "Roll back its model",
    "round open": "Begin the round now",
    "round close": "Close the round now",
    "round extend": "Extend the round",
    "pause": "Pause",
    "drain": "Pause after this round",
    "resume": "Resume",
}
_COMMAND = re.compile(r"aggregator (round \w+|\w+)(?: (\S+))?.*")
_FEW = ("own", "fedavg", "stream")
"""Styles of lines that can be told apart."""
Facts = dict[str, Any]
Asked = Mapping[str, str]


class Pages:
    """Templates of this package, escaped throughout.

    Args:
        charts: draws what pages show.
    """

    def __init__(self, charts: Charts) -> None:
        import jinja2

        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent / "pages"),
            autoescape=True,
            undefined=jinja2.ChainableUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        numbers = (words.percent, words.megabytes, words.spaced, iso, utc, span)
        for given in (*numbers, words.visible, words.short_name, words.count_of, told, charts.svg):
            self._environment.filters[given.__name__] = given
        self._environment.filters["linked"] = jinja2.pass_context(linked)
        self._environment.globals |= {"troubles": TROUBLES, "buttons": BUTTONS}

    def render(self, template: str, facts: Facts) -> str:
        return self._environment.get_template(template).render(**facts)


def iso(at: float) -> str:
    """Return a Unix time as ``2026-03-01T12:00:00.000Z``."""
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc(at: float) -> str:
    """Return a Unix time for who has no script, in UTC."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%d %b %H:%M:%S UTC")


def span(seconds: float | None) -> str:
    """Return ``0.41 s``, ``12 s`` or ``1:07 h``, and so on."""
    if seconds is None:
        return words.UNKNOWN
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    return f"{minutes}:{int(seconds) % 60:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


def told(value: object, name: str = "") -> str:
    """Return what an event says of something, numbers without digits that nobody reads."""
    if isinstance(value, float):
        return words.percent(value) if "accuracy" in name or name in MEASURES else f"{value:.4g}"
    return words.megabytes(value) if name == "bytes" and isinstance(value, int) else words.visible(str(value))


def linked(context: Mapping[str, Any], text: str) -> Markup:
    """Return text in which a command is the name of the button that does it, for an operator, and leads there."""
    plain, *pieces = re.split("`([^`]+)`", words.visible(text))
    said = Markup.escape(plain)
    for command, after in zip(pieces[::2], pieces[1::2], strict=True):
        found = _COMMAND.fullmatch(command) if getattr(context.get("somebody"), "may_operate", False) else None
        name, client = found.groups() if found else ("", None)
        if name in BUTTONS:
            page = f"/clients/{quote(client)}" if client else "/round"
            said += Markup('<a href="{}">{}</a>').format(page, BUTTONS[name]) + after
        else:
            said += Markup("<code>{}</code>").format(command) + after
    return said


def fleet_page(fleet: Fleet, story: Story, asked: Asked) -> Facts:
    """Return what the page of all clients shows."""
    online, num = sum(member.state == "online" for member in fleet.members), len(fleet.belonging)
    up, down = sum(m.bytes_up for m in fleet.members), sum(m.bytes_down for m in fleet.members)
    troubled = sum(member.num_troubles > 0 for member in fleet.belonging)
    wanted, show = asked.get("q", "").lower(), _SHOWN.get(asked.get("show", ""))
    rows = [m for m in fleet.members if wanted in m.client.lower() and (show is None or show(m))]
    found_boxes = any(told.measure == "boxes_found" for told in story.clients.values())
    measured = MEASURES["boxes_found" if found_boxes else "accuracy"]
    chart, each = _fleet_chart(story, fleet, f"{measured} after each round")
    return {
        "measured": measured,
        "title": "Fleet",
        "headline": headline(fleet),
        "tiles": (
            ("Clients online", f"{online} of {num}" if fleet.is_live else "not known", ""),
            (f"Mean {measured.lower()}", words.percent(fleet.accuracy), ""),
            ("Rounds done", str(fleet.round), ""),
            ("Traffic", words.megabytes(up + down), f"{words.megabytes(up)} up, {words.megabytes(down)} down"),
            ("With trouble", f"{troubled} of {num}", "since the journal begins"),
        ),
        "chart": chart,
        "each": each,
        "rows": sorted(rows, key=lambda m: (-(m.is_awaited + 2 * (m.num_troubles > 0)), m.client)),
        "shows": SHOWS,
    }


def round_page(fleet: Fleet, story: Story, asked: Asked) -> Facts:
    """Return what the page of the current round shows."""
    before = sorted((one for one in story.rounds.values() if one.index < fleet.round), key=lambda one: -one.index)
    phases = ("open", "aggregating", "finished")
    at = phases.index(fleet.phase) if fleet.phase in phases else 0
    last = before[0] if before else None
    texts = ("collects uploads", "averages what came", "every client gets its own model")
    steps = []
    for place, (name, text) in enumerate(zip(("Open", "Aggregating", "Published"), texts, strict=True)):
        state = "now" if place == at and fleet.phase != "finished" else "done" if place < at or at == 2 else "later"
        taken = last.aggregate_s if last and place == 1 else None
        more = f"{text}; it took {span(taken)} last time" if taken is not None and state != "done" else text
        steps.append((name, state, more))
    return {
        "title": f"Round {fleet.round}",
        "headline": headline(fleet),
        "steps": steps,
        "roomy": len(fleet.uploaded) <= MAX_ROOMY,
        "now": story.rounds.get(fleet.round) or RoundStory(fleet.round),
        "rounds": before[:30],
        "no_way_back": fleet.refusals.get("rollback")
        or ("" if any(m.may_return for m in fleet.members) else "nothing earlier is kept of anybody"),
    }


def client_page(fleet: Fleet, story: Story, asked: Asked) -> Facts | None:
    """Return what the page of one client shows; None if nobody knows it."""
    name = asked["client"]
    member, told = fleet.member(name), story.clients.get(name) or ClientStory()
    if member is None:
        return None
    newest = told.reports[-1][1] if told.reports else {}
    left_out = member.state in {"excluded", "revoked"}
    why = f"it is {member.state}, and gets no models" if left_out else "nothing earlier of it is kept"
    return {
        "title": name,
        "member": member,
        "no_part": f"{name} is revoked; `aggregator enroll {name}` takes it in again" * (member.state == "revoked"),
        "no_way_back": fleet.refusals.get("rollback") or ("" if member.may_return else why),
        "told": told,
        "tiles": _client_tiles(member, told),
        "charts": _client_charts(name, told),
        "metrics": sorted((key, _measured(key, value)) for key, value in newest.items()),
        "events": story.search(client=name, limit=15)[0],
    }


def journal_page(fleet: Fleet, story: Story, asked: Asked) -> Facts:
    """Return what the journal's page shows."""
    before = asked.get("before", "")
    only = (lambda event: event.get("event") in TROUBLES) if asked.get("trouble") else None
    found, more = story.search(
        asked.get("q", ""),
        client=asked.get("client", ""),
        kind=asked.get("kind", ""),
        only=only,
        limit=100,
        before=int(before) if before.isdecimal() else None,
    )
    same = {key: asked[key] for key in ("q", "kind", "client", "trouble") if asked.get(key)}
    return {
        "title": "Journal",
        "events": found,
        "kinds": sorted(story.kinds),
        "older": urlencode({**same, "before": found[-1][0]}) if more else "",
        "newest": urlencode(same),
        "oldest": story.oldest > 0,
        "kept": MAX_EVENTS,
    }


def methods_page(fleet: Fleet, story: Story, asked: Asked) -> Facts:
    """Return what the page of aggregation weights and replay shows."""
    weights = {client: shares for client, shares in sorted(story.weights.items()) if isinstance(shares, dict)}
    sources = sorted({name for shares in weights.values() for name in shares})
    is_small = len(sources) <= MAX_MATRIX and len(weights) <= MAX_MATRIX
    nearest = [
        (client, sorted(shares.items(), key=lambda share: (-share[1], share[0]))[:MAX_NEAREST])
        for client, shares in weights.items()
    ]
    replays = [(client, *told.replay) for client, told in sorted(story.clients.items()) if told.replay is not None]
    return {
        "title": "Method",
        "round": story.weights_round,
        "matrix": list(weights.items()),
        "sources": sources if is_small else [],
        "has_numbers": len(sources) <= MAX_NUMBERS,
        "darkest": 1.0 if len(sources) <= MAX_NUMBERS else max(max(shares.values()) for shares in weights.values()),
        "nearest": [] if is_small else nearest,
        "replays": replays,
    }


def headline(fleet: Fleet) -> str:
    """Return one sentence: what the fleet does now."""
    if fleet.phase == "finished":
        return f"The run is finished after {words.count_of(fleet.round, 'round')}"
    if fleet.phase == "aggregating":
        return f"Round {fleet.round} is being aggregated from {words.count_of(len(fleet.uploaded), 'upload')}"
    if fleet.rests:
        return f"Round {fleet.round} waits to begin"
    waits = [member.client for member in fleet.awaited]
    if not waits:
        return f"Round {fleet.round} is open"
    named = waits[0] if len(waits) == 1 else f"{', '.join(waits[:2])} and {len(waits) - 2} more"
    if len(waits) == 2:
        named = " and ".join(waits)
    return f"Round {fleet.round} waits for {named}"


def _client_tiles(member: Member, told: ClientStory) -> tuple[tuple[str, str, str], ...]:
    change = "" if member.change is None else f"{100 * member.change:+.1f} points in its last round"
    latency = told.newest("latency_p95_s")
    return (
        (MEASURES[told.measure], words.percent(member.accuracy), change),
        ("Version", member.version, "confirmed" if member.is_confirmed else "not confirmed"),
        ("Sent", words.megabytes(member.bytes_up), "in all its uploads"),
        ("Received", words.megabytes(member.bytes_down), "in all its downloads"),
        ("Answers within", words.milliseconds(latency), "95 % of its newest pictures"),
    )


def _fleet_chart(story: Story, fleet: Fleet, title: str) -> tuple[Chart | None, str]:
    """Return it, and what its faint lines are."""
    by_client = {name: dict(_series(told, told.measure)) for name, told in sorted(story.clients.items())}
    by_client = {name: values for name, values in by_client.items() if values}
    if not by_client:
        return None, ""
    # Of many clients a round is drawn when it is over, not again with each report.
    over = fleet.round if len(by_client) > MAX_LINES and fleet.phase != "finished" else fleet.round + 1
    rounds = _shown_rounds(index for values in by_client.values() for index in values if index < over)
    each = {name: tuple(values.get(index) for index in rounds) for name, values in by_client.items()}
    mean, faint = _over_all(fmean, each), "each client"
    if len(each) > MAX_LINES:
        each = {"lowest": _over_all(min, each), "highest": _over_all(max, each)}
        faint = "lowest and highest client"
    lines = (
        *((name, shares, "client") for name, shares in each.items()),
        ("mean of the clients", mean, "own"),
    )
    return Chart("fleet", title, lines, rounds[0]), faint


def _client_charts(client: str, told: ClientStory) -> list[tuple[str, Chart, list[tuple[str, str]]]]:
    """Return (id, chart, legend) of what was measured over rounds: all of it, and by place."""
    found = []
    lines = [("on its test set", "accuracy", "own"), ("of what its cameras saw", "stream_accuracy", "stream"),
             ("boxes found", "boxes_found", "fedavg")]  # fmt: skip
    there = [(label, name, style) for label, name, style in lines if told.newest(name) is not None]
    if there:
        found.append(_client_chart(client, told, "accuracy", "Accuracy over its rounds", there))
    prefix = "stream_accuracy/"
    names = sorted({name for _, metrics in told.reports for name in metrics if name.startswith(prefix)})
    if names:
        styles = _FEW if len(names) <= len(_FEW) else ("client",) * len(names)
        places = [(name.removeprefix(prefix), name, style) for name, style in zip(names, styles, strict=False)]
        found.append(_client_chart(client, told, "places", "By place", places))
    return found


def _client_chart(
    client: str, told: ClientStory, id_: str, title: str, lines: list[tuple[str, str, str]]
) -> tuple[str, Chart, list[tuple[str, str]]]:
    rounds = _shown_rounds(index for index, _ in told.reports)
    series = {label: dict(_series(told, name)) for label, name, _ in lines}
    each = {label: tuple(values.get(index) for index in rounds) for label, values in series.items()}
    drawn = [(label, each[label], style) for label, _, style in lines]
    keys = [(style, label) for label, _, style in lines]
    if len(lines) > MAX_LINES:
        mean = f"mean of {len(lines)}"
        drawn = [(name, _over_all(of, each), "client") for name, of in (("lowest", min), ("highest", max))]
        drawn.append((mean, _over_all(fmean, each), "own"))
        keys = [("own", mean), ("client", "lowest and highest")]
    return f"chart-{id_}", Chart(f"{client}/{id_}", title, tuple(drawn), rounds[0]), keys


def _series(told: ClientStory, name: str) -> list[tuple[int, float]]:
    return [(index, metrics[name]) for index, metrics in told.reports if 0 <= metrics.get(name, -1) <= 1]


def _shown_rounds(known: Any) -> list[int]:
    last = max((index for index in known), default=0)
    first = max(0, last - NUM_ROUNDS + 1)
    return list(range(first, last + 1))


def _over_all(
    make: Callable[[list[float]], float], each: Mapping[str, Sequence[float | None]]
) -> tuple[float | None, ...]:
    """Return round by round what becomes of all lines' shares; None where none has one."""
    known = [[share for share in shares if share is not None] for shares in zip(*each.values(), strict=True)]
    return tuple(make(shares) if shares else None for shares in known)


def _measured(name: str, value: float) -> str:
    if name.endswith("_s"):
        return words.milliseconds(value) if value < 1 else span(value)
    if name in {"bytes_up", "bytes_down"}:
        return words.megabytes(value)
    if name.split("/")[0] in {"accuracy", "stream_accuracy", "boxes_found"}:
        return words.percent(value)
    return words.spaced(int(value)) if value == int(value) else f"{value:.4g}"
