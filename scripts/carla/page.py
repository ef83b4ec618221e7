"""The driving demo's page: what was learned in which town, what was sent, what was served, what is stored."""

from __future__ import annotations

import html
import shlex
from collections.abc import Mapping, Sequence

from replayfleet.scripts.carla.facts import Facts, Part, Vehicle
from replayfleet.scripts.carla.quality import EVERYWHERE, Quality
from replayfleet.scripts.carla.stills import Still
from replayfleet.scripts.pages.line_chart import Line, line_chart
from replayfleet.scripts.pages.parts import definitions, document, section, tiles
from replayfleet.scripts.words import UNKNOWN, clock, megabytes, milliseconds, percent

_CHART = (440, 300)
_TITLES = {"crops": "What is this? Objects on the way", "detection": "What is where? Boxes in whole pictures"}
_METHODS = {"pfedgrp": "pFedGRP", "fedgp": "FedGP"}


def page(facts: Facts, stills: Mapping[str, Sequence[Still]]) -> str:
    """Return the page.

    Args:
        facts: the numbers.
        stills: part -> pictures out of its films.
    """
    first, second = headline(facts)
    sections = [_synthetic_note(facts), _tiles(facts), _stills_section(stills)]
    sections += [_part_section(facts, part) for part in facts.parts]
    sections += [_served_section(facts), _stores_section(facts), _settings_section(facts)]
    return document(
        "Replayfleet driving demo", html.escape(first), html.escape(second), [text for text in sections if text]
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
    second = (
        f"They began in different towns and learned for {_rounds(crops)} what objects are and for "
        f"{_rounds(detection)} where they are. Meanwhile {spaced(facts.total('frames'))} frames were answered and "
        f"{spaced(facts.total('dropped'))} dropped. "
        f"{megabytes(up)} went up and {megabytes(down)} came down; no picture left a vehicle."
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


def spaced(number: int) -> str:
    """Return a number with its thousands apart."""
    return f"{number:,}".replace(",", " ")


def _rounds(part: Part) -> str:
    return f"{part.num_rounds} round{'' if part.num_rounds == 1 else 's'}"


def _synthetic_note(facts: Facts) -> str:
    if not facts.synthetic:
        return ""
    return (
        '<p class="note drifted" style="margin-top:1.4rem">SYNTHETIC: these streets are drawn. '
        "What is learned here says nothing about real ones.</p>"
    )


def _tiles(facts: Facts) -> str:
    crops, detection = facts.part("crops"), facts.part("detection")
    ages = [vehicle.age_p95_s for part in facts.parts for vehicle in part.vehicles if vehicle.age_p95_s is not None]
    return tiles(
        [
            (percent(crops.mean("accuracy")), "objects named rightly, all towns, held out", "own"),
            (percent(detection.mean("boxes_found")), "boxes found, all towns, held out", "own"),
            (percent(detection.mean("map50")), "mAP@0.5 on the same pictures", ""),
            (spaced(facts.total("frames")), "frames answered while learning", ""),
            (spaced(facts.total("dropped")), "frames dropped", ""),
            (milliseconds(max(ages, default=None)), "frame age at the answer, p95 of the slowest", ""),
        ]
    )


def _stills_section(stills: Mapping[str, Sequence[Still]]) -> str:
    figures = "".join(_figure(part, still) for part, found in stills.items() for still in found)
    if not figures:
        return ""
    return section(
        "stills",
        "What the vehicles saw",
        "Out of their films: colour is what the model said, thin white is what is there. White words stand where the "
        "model said something else or nothing.",
        f'<div class="stills">{figures}</div>',
    )


def _figure(part: str, still: Still) -> str:
    text = html.escape(f"{part}: {still.film}, picture {still.index} of {still.num_frames}")
    return f'<figure><img src="{still.data_uri}" alt="{text}"><figcaption>{text}</figcaption></figure>'


def _part_section(facts: Facts, part: Part) -> str:
    measure = "boxes found" if part.is_detection else "objects named rightly"
    charts = "".join(_chart(part, vehicle, measure) for vehicle in part.vehicles)
    legend = (
        f'<span class="key own">{measure} on what was held out so far, after the round</span>'
        f'<span class="key stream">{measure} in what came, before it was learned</span>'
        '<span class="key change">first round in a town</span>'
    )
    early = facts.marker.get(f"{part.name}_complete") is False
    note = (
        f'<p class="note drifted">The road was over after {_rounds(part)}: this machine trains slower than planned.</p>'
        if early
        else ""
    )
    return section(
        part.name,
        _TITLES[part.name],
        f"{html.escape(method_name(part))}, {_rounds(part)}. Every frame is learned from in one round only, "
        "or held out: of four in a row the last one, which the vehicle never learns from. So the solid line is about "
        "everything met so far, and forgetting shows; the dotted line is about what is new.",
        f'{note}<div class="card"><div class="legend">{legend}</div><div class="charts">{charts}</div></div>'
        + _quality_table(part),
    )


def _chart(part: Part, vehicle: Vehicle, measure: str) -> str:
    starts = vehicle.town_starts
    lines = [Line(f"{measure}, what came", vehicle.stream, "stream"), Line(measure, vehicle.held_out, "own")]
    chart = line_chart(
        lines,
        changes=[index for index in starts if index > 0],
        change_name="a new town",
        size=_CHART,
        title=f"{vehicle.name}, {part.name}: {measure} after each round",
        places=starts,
    )
    return f"<div><h3>{html.escape(vehicle.name)}</h3>{chart}</div>"


def _quality_table(part: Part) -> str:
    towns = sorted({town for vehicle in part.vehicles for town in vehicle.quality if town != EVERYWHERE})
    head = "".join(f"<th>{html.escape(town)}</th>" for town in (*towns, EVERYWHERE))
    rows = "".join(
        f'<tr><th scope="row">{html.escape(vehicle.name)}</th>'
        + "".join(_quality_cell(vehicle.quality.get(town), own=town == EVERYWHERE) for town in (*towns, EVERYWHERE))
        + "</tr>"
        for vehicle in part.vehicles
    )
    what = "boxes found, and mAP@0.5 (torchmetrics)" if part.is_detection else "objects named rightly"
    return (
        f"<h3>The last models on held-out pictures, town by town: {what}</h3>"
        f'<div class="card scroll"><table class="rounds"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _quality_cell(quality: Quality | None, *, own: bool) -> str:
    if quality is None:
        return f"<td>{UNKNOWN}</td>"
    style = ' class="own"' if own else ""
    if quality.boxes_found is None:
        return f"<td{style}><b>{percent(quality.accuracy)}</b><span>of {quality.num_objects} objects</span></td>"
    map50 = "not measured" if quality.map50 is None else percent(quality.map50)
    return (
        f"<td{style}><b>{percent(quality.boxes_found)}</b><span>of {quality.num_objects} boxes</span>"
        f"<span>mAP@0.5 {map50}</span></td>"
    )


def _served_section(facts: Facts) -> str:
    rows = "".join(_served_row(part, vehicle) for part in facts.parts for vehicle in part.vehicles)
    headings = ("", "frames answered", "dropped", "failed", "age p95", "up", "down", "sub-generators sent")
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    table = f'<table class="rounds"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return section(
        "served",
        "What was served and what was sent",
        "Dropped are frames that came before there was a model, and of a live camera those that nobody had time for. "
        "Age is from the capture to the answer, over the newest thousand frames, while the vehicle was training. "
        "What goes up are task models, sub-generators and, with FedGP, one gradient; never a picture.",
        f'<div class="card scroll">{table}</div>',
    )


def _served_row(part: Part, vehicle: Vehicle) -> str:
    held = vehicle.total("held")
    cells = [
        spaced(vehicle.count("frames")),
        spaced(vehicle.count("dropped")),
        spaced(vehicle.count("failed")),
        milliseconds(vehicle.age_p95_s),
        megabytes(vehicle.total("bytes_up")),
        megabytes(vehicle.total("bytes_down")),
        f"{vehicle.total('sent')} of {held}" if held else UNKNOWN,
    ]
    name = html.escape(f"{part.name}, {vehicle.name}")
    return f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _stores_section(facts: Facts) -> str:
    notes = "".join(
        f'<p class="note {"drifted" if part.record.stores_data else "quiet"}">{html.escape(storing(part))}.</p>'
        for part in facts.parts
    )
    return section(
        "stores",
        "Which method stores real samples",
        "A method that keeps a buffer keeps what a camera saw, on the vehicle. Beside that this demo asked for "
        "held-out pictures, which are in memory and gone with the process, and for films, which stay in its folder.",
        notes,
    )


def _settings_section(facts: Facts) -> str:
    marker = facts.marker
    run = [
        ("towns", str(marker.get("roads", ""))),
        ("seed", str(marker.get("seed", ""))),
        ("broker", str(marker.get("broker", "")).partition(",")[0]),
        ("pictures per town", str(marker.get("frames_per_town", ""))),
        ("driven slower by", f"{float(marker.get('slower', 1.0)):g}"),
        ("both parts", f"{clock(float(marker.get('seconds', 0.0)))} minutes"),
    ]
    for part in facts.parts:
        seconds = float(marker.get(f"{part.name}_s", 0.0))
        rate = float(marker.get("rate_hz", {}).get(part.name, 0.0))
        run += [(part.name, f"{clock(seconds)} minutes, {rate:g} pictures/s")]
    blocks = [definitions("Run", run)]
    blocks.append(definitions("Machine", [(name, str(value)) for name, value in marker.get("hardware", {}).items()]))
    for part in facts.parts:
        settings = part.record.spec.get("settings", {})
        blocks.append(definitions(f"Settings of {method_name(part)}", [(k, str(v)) for k, v in settings.items()]))
    ways = [
        (f"{part.name}, {vehicle.name}", ", ".join(vehicle.towns)) for part in facts.parts for vehicle in part.vehicles
    ]
    blocks.append(definitions("Ways", ways))
    troubles = [html.escape(trouble) for part in facts.parts for trouble in part.record.troubles]
    command = shlex.join(map(str, marker.get("command", [])))
    return (
        '<section id="settings"><h2>What ran</h2><div class="blocks">' + "".join(blocks) + "</div>"
        f"<h3>Command</h3><pre>{html.escape(command)}</pre>"
        + (
            "<h3>Refused or failed on the way</h3><ul>" + "".join(f"<li>{t}</li>" for t in troubles) + "</ul>"
            if troubles
            else ""
        )
        + "</section>"
    )
