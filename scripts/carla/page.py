"""The driving demo's page: what was learned in which town, sent, served and stored. Its text is ``page.html``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replayfleet.federation.service.pages import render
from replayfleet.federation.service.pages.charts import Line, line_chart
from replayfleet.federation.service.words import clock, megabytes, milliseconds, percent, spaced
from replayfleet.scripts.carla.facts import Facts, Part, Vehicle
from replayfleet.scripts.carla.stills import Still

_CHART = (440, 300)
_METHODS = {"pfedgrp": "pFedGRP", "fedgp": "FedGP"}


def page(facts: Facts, stills: Mapping[str, Sequence[Still]]) -> str:
    """Return the page.

    Args:
        facts: the numbers.
        stills: part -> pictures out of its films.
    """
    first, second = headline(facts)
    return render(
        Path(__file__).with_name("page.html"),
        title="Replayfleet driving demo",
        headline=first,
        lead=second,
        facts=facts,
        stills=stills,
        numbers=_numbers(facts),
        chart=_chart,
        method_name=method_name,
        storing=storing,
        blocks=_blocks(facts),
        commands=[shlex.join(map(str, facts.marker.get("command", [])))],
    )


def headline(facts: Facts) -> tuple[str, str]:
    """Return two sentences about the whole run."""
    crops, detection = facts.part("crops"), facts.part("detection")
    kind = "drawn" if facts.synthetic else "recorded"
    num_towns = len({town for part in facts.parts for vehicle in part.vehicles for town in vehicle.towns})
    first = (
        f"After a drive through {num_towns} {kind} towns the two vehicles' own models name "
        f"{percent(crops.mean('accuracy'))} of all held-out objects rightly, and their common detector finds "
        f"{percent(detection.mean('boxes_found'))} of all held-out boxes (mAP@0.5 "
        f"{percent(detection.mean('map50'))})."
    )
    up, down = facts.bytes()
    rounds = [f"{part.num_rounds} round{'' if part.num_rounds == 1 else 's'}" for part in (crops, detection)]
    second = (
        f"They began in different towns and learned for {rounds[0]} what objects are and for {rounds[1]} where they "
        f"are. Meanwhile {spaced(facts.total('frames'))} frames were answered and {spaced(facts.total('dropped'))} "
        f"dropped. {megabytes(up)} went up and {megabytes(down)} came down; no picture left a vehicle."
    )
    return first, second


def summary(facts: Facts) -> list[str]:
    """Return the run in a few lines, for a terminal."""
    return [*headline(facts), *(f"{part.name}: {storing(part)}" for part in facts.parts)]


def storing(part: Part) -> str:
    """Say plainly whether the part's method keeps real samples."""
    name = method_name(part)
    if part.record.stores_data:
        size = part.record.spec.get("settings", {}).get("buffer_size", "some")
        return f"{name} STORES DATA: every vehicle keeps up to {size} real samples in its data dir"
    return f"{name} stores no real sample: of earlier towns a vehicle keeps models and generators only"


def method_name(part: Part) -> str:
    """Return the method with its base, as papers call it."""
    spec = part.record.spec
    name = _METHODS.get(str(spec.get("method")), str(spec.get("method")))
    base = str(spec.get("settings", {}).get("base", "plain"))
    return name if base == "plain" else f"{base.upper()} with {name}"


def _numbers(facts: Facts) -> list[tuple[str, str, str]]:
    crops, detection = facts.part("crops"), facts.part("detection")
    ages = [vehicle.age_p95_s for part in facts.parts for vehicle in part.vehicles if vehicle.age_p95_s is not None]
    return [
        (percent(crops.mean("accuracy")), "objects named rightly, all towns, held out", "own"),
        (percent(detection.mean("boxes_found")), "boxes found, all towns, held out", "own"),
        (percent(detection.mean("map50")), "mAP@0.5 on the same pictures", ""),
        (spaced(facts.total("frames")), "frames answered while learning", ""),
        (spaced(facts.total("dropped")), "frames dropped", ""),
        (milliseconds(max(ages, default=None)), "frame age at the answer, p95 of the slowest", ""),
    ]


def _chart(part: Part, vehicle: Vehicle, measure: str) -> str:
    starts = vehicle.town_starts
    return line_chart(
        [Line(f"{measure}, what came", vehicle.stream, "stream"), Line(measure, vehicle.held_out, "own")],
        changes=[index for index in starts if index > 0],
        size=_CHART,
        title=f"{vehicle.name}, {part.name}: {measure} after each round",
        places=starts,
    )


def _blocks(facts: Facts) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return enough to run the same again, and what it ran on."""
    marker = facts.marker
    run = [
        ("towns", marker.get("roads", "")),
        ("seed", marker.get("seed", "")),
        ("broker", str(marker.get("broker", "")).partition(",")[0]),
        ("pictures per town", marker.get("frames_per_town", "")),
        ("driven slower by", float(marker.get("slower", 1.0))),
        ("both parts", f"{clock(float(marker.get('seconds', 0.0)))} minutes"),
    ]
    for part in facts.parts:
        rate = float(marker.get("rate_hz", {}).get(part.name, 0.0))
        run.append((part.name, f"{clock(float(marker.get(f'{part.name}_s', 0.0)))} minutes, {rate:g} pictures/s"))
    ways = [(f"{part.name}, {one.name}", ", ".join(one.towns)) for part in facts.parts for one in part.vehicles]
    settings = [
        (f"Settings of {method_name(part)}", list(part.record.spec.get("settings", {}).items())) for part in facts.parts
    ]
    return [("Run", run), ("Machine", list(marker.get("hardware", {}).items())), *settings, ("Ways", ways)]
