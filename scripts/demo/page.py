"""The report as one HTML page: sections in the order in which questions come. Their text is ``page.html``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replayfleet.federation.service.pages import render
from replayfleet.federation.service.pages.charts import Line, line_chart
from replayfleet.federation.service.words import clock, milliseconds, percent, spaced
from replayfleet.scripts.demo.facts import Facts
from replayfleet.scripts.demo.plan import METHODS
from replayfleet.scripts.demo.rivals import NAMES
from replayfleet.scripts.demo.samples import Picture, draws_all_classes, why_nothing_is_drawn
from replayfleet.scripts.demo.sentences import headline, is_quiet, revisit_sentence
from replayfleet.scripts.launch.record import ClientRound

_WIDE, _NARROW = (880, 380), (400, 300)


def page(facts: Facts, generated: Mapping[str, Sequence[Picture]], real: Sequence[Picture]) -> str:
    """Return the page.

    Args:
        facts: the numbers.
        generated: client -> a picture per class that it has a sub-generator of.
        real: a picture per class.
    """
    first, second = headline(facts)
    stream = facts.baseline.stream
    changes = [index for index in stream["changes"] if index < len(facts.rounds)]
    wide, narrow = (line_chart(_lines(facts), changes=changes, size=size) for size in (_WIDE, _NARROW))
    ways = [way for found in facts.rounds for way in (facts.up(found), facts.down(found))]
    return render(
        Path(__file__).with_name("page.html"),
        title="Replayfleet demo",
        headline=first,
        lead=second,
        facts=facts,
        method=_method(facts),
        numbers=_numbers(facts),
        rivals=[(f"rival-{place}", NAMES[name]) for place, name in enumerate(facts.rivals)],
        rivals_note=_rivals_note(facts),
        wide_chart=wide,
        narrow_chart=narrow,
        change_name=stream["change_name"] if changes else "",
        revisits=[(is_quiet(clients), revisit_sentence(facts, index)) for index, clients in facts.revisits().items()],
        what_is_drawn=why_nothing_is_drawn(facts.record.spec) or _what_is_drawn(facts),
        generated=generated,
        real=real,
        largest=max([1.0, *(max(way.sent, way.everything) for way in ways)]),
        blocks=_blocks(facts),
        commands=[
            shlex.join(map(str, facts.demo.get("command", []))),
            *(shlex.join(one.command) for one in (facts.baseline, *facts.rivals.values())),
        ],
    )


def _numbers(facts: Facts) -> list[tuple[str, str, str]]:
    own, fedavg = facts.final
    sent, held = facts.sub_generators()
    return [
        (percent(own), "personalised models, mean of the clients", "own"),
        (percent(fedavg), "FedAvg's one model, the same mean", "fedavg"),
        (f"{sent} of {held}", "sub-generators uploaded", ""),
        (f"{100 * facts.traffic().saved_share:.0f} %", "of all bytes saved", ""),
        (spaced(facts.num_frames), "frames answered while learning", ""),
        (milliseconds(facts.slowest("swap_s")), "slowest load, check and swap; frames flow on", ""),
    ]


def _lines(facts: Facts) -> list[Line]:
    clients = [
        Line(name, [found.clients.get(name, ClientRound()).accuracy for found in facts.rounds], "client")
        for name in facts.record.names
    ]
    fedavg = Line("FedAvg, mean of the clients", facts.baseline_accuracy, "fedavg")
    rivals = [
        Line(f"{NAMES[name]}, simulated, mean of the clients", [record.accuracy for record in one.rounds], f"rival-{i}")
        for i, (name, one) in enumerate(facts.rivals.items())
    ]
    return [*clients, *rivals, fedavg, Line(f"{_method(facts)}, mean of the clients", facts.accuracy, "own")]


def _rivals_note(facts: Facts) -> str:
    """Say where the rivals' curves come from; nothing where there are none."""
    if not facts.rivals:
        return ""
    names = ", ".join(NAMES[name] for name in facts.rivals)
    commits = " and ".join(sorted({one.commit[:12] for one in facts.rivals.values()}))
    one = next(iter(facts.rivals.values()))
    machine = one.hardware.get("processor") or one.hardware.get("machine", "")
    return (
        f"{names}: not run here. This comes with the project, from its simulator, which computes what a fleet "
        f"does to the bit, on this stream at these settings and with this seed (commit {commits}, {machine}, "
        f"torch {one.versions.get('torch', '')}). The commands stand at the end of the page."
    )


def _what_is_drawn(facts: Facts) -> str:
    replay = (
        "The number says how many of 64 samples the client's own task model takes for the class; replay keeps those."
    )
    if draws_all_classes(facts.record.spec):
        replay = (
            "A client has one generator for all classes, which nobody can ask for one of them: when it replays, a task "
            "model says what each sample shows."
        )
    return (
        "Drawn from the aggregator's cache at the end, as they come, unfiltered. The aggregator never sees an image: "
        f"this is what it replays. {replay}"
    )


def _method(facts: Facts) -> str:
    name = str(facts.record.spec["method"])
    return METHODS.get(name, name)


def _blocks(facts: Facts) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return enough to run the same again, and what it ran on."""
    spec, demo, baseline = facts.record.spec, facts.demo, facts.baseline
    stream, hardware = baseline.run["stream"], baseline.hardware
    run = {
        "method": spec["method"],
        "data set": baseline.run["dataset"],
        "stream": f"{stream['scenario']}, {stream['samples_per_class']} images per class and round",
        "clients": len(facts.record.clients),
        "rounds": len(facts.rounds),
        "seed": spec["run_seed"],
        "settings": demo.get("preset", ""),
        "fleet's time": f"{clock(facts.record.ended_at - facts.record.started_at)} minutes",
        "FedAvg's simulation": f"{clock(baseline.wall_s)} minutes, beside the fleet",
        "broker": str(demo.get("broker", "")).partition(",")[0],
        "threads": "1 per process",
    }
    machine = {
        "processor": hardware.get("processor") or hardware.get("machine", ""),
        "cores": hardware.get("num_cores", ""),
        "system": hardware.get("system", ""),
        "commit": baseline.commit[:12] + ("+" if baseline.commit.endswith("+") else "") or "outside a checkout",
        **baseline.versions,
    }
    own, fedavg = spec["settings"], baseline.run["settings"]
    blocks = {
        "Run": run,
        "Machine and versions": machine,
        f"Settings of {_method(facts)}": own,
        "Settings of FedAvg": fedavg,
    }
    return [(title, list(values.items())) for title, values in blocks.items()]
