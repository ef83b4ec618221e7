"""The report as one HTML page: sections in the order in which questions come."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from replayfleet.scripts.demo.facts import Facts, Traffic
from replayfleet.scripts.demo.samples import Picture, draws_all_classes, why_nothing_is_drawn
from replayfleet.scripts.demo.sentences import headline, is_quiet, revisit_sentence
from replayfleet.scripts.demo.settings_section import settings_section
from replayfleet.scripts.launch.record import Client, ClientRound, Round
from replayfleet.scripts.pages.line_chart import Line, line_chart
from replayfleet.scripts.pages.parts import document, section, tiles
from replayfleet.scripts.words import UNKNOWN, megabytes, milliseconds, percent, short_name

_WIDE, _NARROW = (880, 380), (400, 300)
_HEAT_CROSSOVER = 0.82
"""Above this share a cell is so dark that its number is written light."""


def page(facts: Facts, generated: Mapping[str, Sequence[Picture]], real: Sequence[Picture]) -> str:
    """Return the page.

    Args:
        facts: the numbers.
        generated: client -> a picture per class that it has a sub-generator of.
        real: a picture per class.
    """
    first, second = headline(facts)
    sections = [
        _tiles(facts),
        _accuracy_section(facts),
        _rounds_section(facts),
        _weights_section(facts),
        _samples_section(facts, generated, real),
        _bytes_section(facts),
        settings_section(facts),
    ]
    return document("Replayfleet demo", first, second, sections)


def _tiles(facts: Facts) -> str:
    own, fedavg = facts.final
    sent, held = facts.sub_generators()
    found = [
        (percent(own), "personalised models, mean of the clients", "own"),
        (percent(fedavg), "FedAvg's one model, the same mean", "fedavg"),
        (f"{sent} of {held}", "sub-generators uploaded", ""),
        (f"{100 * facts.traffic().saved_share:.0f} %", "of all bytes saved", ""),
        (f"{facts.num_frames:,}".replace(",", " "), "frames answered while learning", ""),
        (milliseconds(facts.slowest("swap_s")), "slowest load, check and swap; frames flow on", ""),
    ]
    return tiles(found)


def _accuracy_section(facts: Facts) -> str:
    lines = [Line(name, _accuracies(facts, name), "client", has_end=False) for name in facts.record.names]
    lines.append(Line("FedAvg, mean of the clients", facts.baseline_accuracy, "fedavg"))
    lines.append(Line("pFedGRP, mean of the clients", facts.accuracy, "own"))
    stream = facts.baseline.stream
    charts = "".join(
        f'<div class="{style}">'
        + line_chart(lines, changes=stream["changes"], change_name=str(stream["change_name"]), size=size)
        + "</div>"
        for style, size in (("wide", _WIDE), ("narrow", _NARROW))
    )
    keys = [("own", "pFedGRP, mean"), ("client", "pFedGRP, each client"), ("fedavg", "FedAvg, mean")]
    if any(index < len(facts.rounds) for index in stream["changes"]):
        keys.append(("change", str(stream["change_name"])))
    legend = "".join(f'<span class="key {style}">{html.escape(text)}</span>' for style, text in keys)
    return section(
        "accuracy",
        "Accuracy on everything met so far",
        "Every round brings new images of a few classes, usable in that round only, and its test images join the "
        "client's test set for good: the task grows, and forgetting shows. pFedGRP was measured on the devices, "
        "through the ONNX model each was serving; FedAvg was simulated on the same stream, seed and task model.",
        f'<div class="card"><div class="legend">{legend}</div>{charts}</div>',
    )


def _accuracies(facts: Facts, name: str) -> list[float | None]:
    return [found.clients.get(name, ClientRound()).accuracy for found in facts.rounds]


def _rounds_section(facts: Facts) -> str:
    names = facts.record.names
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = "".join(_round_row(facts, found) for found in facts.rounds)
    notes = "".join(
        f'<p class="note {"quiet" if is_quiet(clients) else "drifted"}">{revisit_sentence(facts, index)}</p>'
        for index, clients in facts.revisits().items()
    )
    return section(
        "rounds",
        "Round by round",
        "What each client met, how many of its sub-generators it had to upload, and how well the model that came back "
        "does. A drift gate decides: a sub-generator whose samples the new task model still recognises stays as it is.",
        f'{notes}<div class="card scroll"><table class="rounds"><thead><tr><th>round</th>{head}<th>mean</th>'
        f"<th>FedAvg</th><th>uploads</th><th>time</th></tr></thead><tbody>{rows}</tbody></table></div>",
    )


def _round_row(facts: Facts, found: Round) -> str:
    cells = "".join(_client_cell(found.clients.get(name), facts.record.class_names) for name in facts.record.names)
    baseline = facts.baseline_accuracy
    fedavg = percent(baseline[found.index]) if found.index < len(baseline) else UNKNOWN
    seconds = UNKNOWN if found.round_s is None else f"{found.round_s:.0f} s"
    return (
        f'<tr><th scope="row">{found.index}</th>{cells}<td class="own"><b>{percent(found.mean_accuracy)}</b></td>'
        f'<td class="fedavg">{fedavg}</td><td>{found.num_uploads} of {found.expected}</td><td>{seconds}</td></tr>'
    )


def _client_cell(client: ClientRound | None, class_names: Sequence[str]) -> str:
    if client is None or client.bytes_up is None:
        return '<td class="missed">missed</td>'
    classes = ", ".join(html.escape(class_names[c]) if c < len(class_names) else str(c) for c in client.classes)
    sent = f"{client.sent} of {client.held} sent"
    if client.known_before and client.sent == 0:
        sent = '<span class="badge quiet">revisit: nothing sent</span>'
    elif client.known_before:
        sent = f'<span class="badge drifted">revisit, drifted: {client.sent} sent</span>'
    return f'<td><b>{percent(client.accuracy)}</b><span class="classes">{classes}</span><span>{sent}</span></td>'


def _weights_section(facts: Facts) -> str:
    rounds = [found for found in facts.rounds if found.weights]
    tables = "".join(
        f"<figure><figcaption>round {found.index}</figcaption>{_heat_map(found.weights)}</figure>" for found in rounds
    )
    count = len(facts.record.clients)
    return section(
        "weights",
        "Who learns from whom",
        "Aggregation weights: a row is a client's personalised model, a column whose task model it is mixed from. The "
        "aggregator finds them by replaying each client's own classes from its sub-generators. FedAvg would be "
        f"{1 / count:.2f} everywhere.",
        f'<div class="heats" style="--clients:{count}">{tables}</div>',
    )


def _heat_map(weights: Mapping[str, Mapping[str, float]]) -> str:
    sources = sorted({source for shares in weights.values() for source in shares})
    head = "".join(f'<th scope="col">{_short(source)}</th>' for source in sources)
    rows = "".join(
        f'<tr><th scope="row">{_short(name)}</th>'
        + "".join(_heat_cell(shares.get(source), f"{name} from {source}") for source in sources)
        + "</tr>"
        for name, shares in sorted(weights.items())
    )
    return f'<table class="heat"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _heat_cell(share: float | None, title: str) -> str:
    if share is None:
        return f"<td>{UNKNOWN}</td>"
    dark = ' class="dark"' if share > _HEAT_CROSSOVER else ""
    return f'<td{dark} style="--share:{100 * share:.1f}%" title="{html.escape(title)}">{share:.2f}</td>'


def _short(name: str) -> str:
    return html.escape(short_name(name))


def _samples_section(facts: Facts, generated: Mapping[str, Sequence[Picture]], real: Sequence[Picture]) -> str:
    names = facts.record.class_names
    blocks = [_sheet("real test images, for comparison", real, names)]
    blocks += [_sheet(name, pictures, names) for name, pictures in sorted(generated.items())]
    return section(
        "samples",
        "What the sub-generators remember",
        why_nothing_is_drawn(facts.record.spec) or _what_is_drawn(facts),
        "".join(blocks),
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


def _sheet(title: str, pictures: Sequence[Picture], class_names: Sequence[str]) -> str:
    cells = "".join(_picture(picture, class_names) for picture in pictures)
    return f'<h3>{html.escape(title)}</h3><div class="sheet">{cells}</div>'


def _picture(picture: Picture, class_names: Sequence[str]) -> str:
    name = "all classes" if picture.class_id is None else str(picture.class_id)
    if picture.class_id is not None and picture.class_id < len(class_names):
        name = html.escape(class_names[picture.class_id])
    share = "" if picture.recognised is None else f"<i>{100 * picture.recognised:.0f} %</i>"
    caption = f"<figcaption><span>{name}</span>{share}</figcaption>"
    return f'<figure><img src="{picture.data_uri}" alt="{name}">{caption}</figure>'


def _bytes_section(facts: Facts) -> str:
    pairs = [(found, facts.up(found), facts.down(found)) for found in facts.rounds]
    largest = max((max(up.everything, down.everything) for _, up, down in pairs), default=1.0) or 1.0
    rows = "".join(
        f'<div class="bytes"><b>{found.index}</b>{_bar("up", up, largest)}{_bar("down", down, largest)}</div>'
        for found, up, down in pairs
    )
    total = facts.traffic()
    first = sum(client.first_bytes for client in _clients(facts))
    legend = (
        '<span class="key up">uploaded by all clients</span><span class="key down">received by all clients</span>'
        '<span class="key everything">sending everything</span>'
    )
    return section(
        "bytes",
        "Bytes on the wire",
        f"{megabytes(total.sent)} instead of {megabytes(total.everything)}: everything "
        "large is content-addressed, and what the other end holds stays where it is. Sending everything means both "
        "models and all of a client's sub-generators, in every round. Before round 0 the clients received "
        f"{megabytes(first)} once: ONNX graphs and the first model.",
        f'<div class="card"><div class="legend">{legend}</div>{rows}</div>',
    )


def _clients(facts: Facts) -> list[Client]:
    return [facts.record.clients[name] for name in facts.record.names]


def _bar(kind: str, traffic: Traffic, largest: float) -> str:
    width = 100 * max(traffic.everything, traffic.sent) / largest
    sent = 100 * traffic.sent / largest
    return (
        f'<div class="bar {kind}"><i class="everything" style="width:{width:.1f}%"></i>'
        f'<i class="sent" style="width:{sent:.1f}%"></i>'
        f"<span>{megabytes(traffic.sent)} <em>of {megabytes(traffic.everything)}</em></span></div>"
    )
