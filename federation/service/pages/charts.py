"""Shares over rounds as a picture, for pages and for files. Matplotlib is imported when the first chart is drawn."""

from __future__ import annotations

import html
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_THEME = {
    "own": "#1f66d1",
    "fedavg": "#c4570c",
    "down": "#6b52c8",
    "quiet": "#16794c",
    "soft": "#5c626e",
    "grid": "#ececea",
    "card": "#fffffe",
}
"""CSS variables of a page, and what a viewer shows that knows none."""

_STYLES: Mapping[str, dict[str, Any]] = MappingProxyType({
    "own": {"linewidth": 3.0},
    "fedavg": {"linewidth": 3.0, "linestyle": (0, (2.3, 2))},
    "client": {"linewidth": 1.3, "alpha": 0.38},
    "stream": {"linewidth": 1.8, "linestyle": (0, (1.7, 2.8))},
    "rival-0": {"linewidth": 1.6, "linestyle": (0, (5, 2))},
    "rival-1": {"linewidth": 1.6, "linestyle": (0, (4, 1.5, 1, 1.5))},
    "rival-2": {"linewidth": 1.6, "linestyle": (0, (1.2, 1.4))},
})  # fmt: skip
_COLOURS = MappingProxyType({
    "own": "own", "client": "own", "fedavg": "fedavg", "stream": "down",
    "rival-0": "down", "rival-1": "soft", "rival-2": "quiet",
})  # fmt: skip
_MARKED_CHANGES = 15
"""More of them are drawn faintly."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 58, 14, 38
_ROW = 17
"""Pixels between two labels, one over the other."""

_LETTER = 7.3
"""Of the labels' 13 pixels, on the average."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a page.

    Attributes:
        label: what a reader sees when pointing at one of its dots.
        values: shares in [0, 1], one per round; None where nothing was measured.
        style: ``own``, ``client``, ``fedavg``, ``stream`` or ``rival-0`` to ``-2``; of a client neither dots nor the
            last value are shown, of a rival no dots.
    """

    label: str
    values: Sequence[float | None]
    style: str


def percent_axes(figure: Figure, num_rounds: int, changes: Sequence[int] = (), change_name: str = "") -> Axes:
    """Return axes of percents over rounds.

    Args:
        figure: takes them.
        num_rounds: from 0 on.
        changes: rounds at which streams change, marked by dotted lines just before them.
        change_name: what a legend calls those.
    """
    axes = round_axes(figure, num_rounds, changes, change_name)
    axes.set_ylim(0, 100)
    return axes


def round_axes(figure: Figure, num_rounds: int, changes: Sequence[int] = (), change_name: str = "") -> Axes:
    """Return axes of anything over rounds; see ``percent_axes``."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot()
    axes.set_xlabel("round")
    axes.set_xlim(-0.5, num_rounds - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for place, change in enumerate(changes):
        name = change_name if place == 0 else None
        faint = 1.0 if len(changes) <= _MARKED_CHANGES else 0.35
        axes.axvline(change - 0.5, color="0.55", linestyle=":", linewidth=1.1, alpha=faint, label=name, zorder=1)
    return axes


def line_chart(
    lines: Sequence[Line],
    *,
    changes: Sequence[int],
    size: tuple[int, int],
    title: str = "Accuracy after each round",
    first_round: int = 0,
    places: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """Return an SVG element for a page, whose colours it takes; lines later in the list are drawn on top.

    Args:
        lines: at least one, with equally many rounds.
        changes: rounds before which the stream changes.
        size: (width, height) of the drawing in pixels; text keeps its size.
        title: what the drawing shows.
        first_round: that of the first values, for the axis and for what dots say.
        places: round -> a word that stands over the drawing where the stream enters a place in that round.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    width, height = size
    num_rounds = max(len(line.values) for line in lines)
    entered = {index: name for index, name in sorted(places.items()) if index < num_rounds}
    labels = _labels(entered, [index for index in changes if index < num_rounds], num_rounds, width)
    rows = 1 + max((row for _, _, row in labels.values()), default=-1)
    top = _TOP + (_ROW * rows + 3 if rows else 0)
    texts: list[str] = []  # shown to whoever points at an artist, and to those who don't see
    # One pixel is one point. Ids within the drawing are told apart from those of the page's other drawings.
    with mpl.rc_context():
        mpl.rcdefaults()  # what a program or its user chose may need a LaTeX that isn't there
        mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": f"{title} {size}", "font.size": 13})
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        axes = percent_axes(figure, num_rounds)
        axes.set_position((_LEFT / width, _BOTTOM / height, 1 - (_LEFT + _RIGHT) / width, 1 - (top + _BOTTOM) / height))
        axes.set_xlim(*((0, num_rounds - 1) if num_rounds > 1 else (-0.5, 0.5)))
        axes.xaxis.set_major_formatter(lambda at, _: f"{at + first_round:.0f}")
        axes.set_yticks([0, 25, 50, 75, 100], ["0 %", "25 %", "50 %", "75 %", "100 %"])
        axes.spines["left"].set_visible(False)
        axes.spines["bottom"].set_color(_THEME["soft"])
        axes.tick_params(length=0, pad=7, labelcolor=_THEME["soft"])
        axes.xaxis.label.set_color(_THEME["soft"])
        axes.grid(axis="y", color=_THEME["grid"], linewidth=1, clip_on=False)
        per_pixel = 1 / (height - top - _BOTTOM)
        for index, (x, name, row) in sorted(labels.items()):
            reach = 1 + per_pixel * (0 if row < 0 else 8 + _ROW * row + _ROW - 5)
            if index in changes:
                axes.axvline(
                    index - 0.5, ymax=reach, color=_THEME["soft"], lw=2, ls=(0, (0.7, 2.5)), clip_on=False, zorder=1
                )
            if name:
                y = (height - top + 8 + _ROW * row) / height
                figure.text(x / width, y, name, color=_THEME["soft"], gid=f"tip-{len(texts)}")
                texts.append(entered[index])
        for line in lines:
            _draw(axes, line, texts, first_round)
        _write_ends(axes, lines, per_pixel)
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None})
    return _for_a_page(drawing.getvalue(), title, texts)


def _labels(
    places: Mapping[int, str], changes: Sequence[int], num_rounds: int, width: int
) -> dict[int, tuple[float, str, int]]:
    """Return round -> x of its label, as much of the label as there is room for, and its row counted upwards.

    A line ends under its own label, so a label may reach over later lines if it stands higher than theirs.
    """

    def x_of(index: float) -> float:
        return _LEFT + (width - _LEFT - _RIGHT) * (index / (num_rounds - 1) if num_rounds > 1 else 0.5)

    found: dict[int, tuple[float, str, int]] = {}
    for index in sorted({*places, *changes}, reverse=True):
        begin = max(float(_LEFT), x_of(index - 0.5) + 6)
        name, room = places.get(index, ""), int((width - begin) / _LETTER)
        name = name if len(name) <= room else f"{name[: max(1, room - 1)]}…"
        end = begin + _LETTER * len(name)
        reached = [row for later, (_, _, row) in found.items() if x_of(later - 0.5) - 4 < end]
        found[index] = begin, name, 1 + max(reached, default=-1) if name else -1
    return found


def _draw(axes: Axes, line: Line, texts: list[str], first_round: int) -> None:
    colour = _THEME[_COLOURS[line.style]]
    known = [(index, 100 * value) for index, value in enumerate(line.values) if value is not None]
    style = {**_STYLES[line.style], "color": colour, "clip_on": False, "solid_capstyle": "round"}
    style |= {"marker": "o"} if len(known) == 1 else {}  # a line of one point can't be seen
    axes.plot([index for index, _ in known], [value for _, value in known], gid=f"tip-{len(texts)}", **style)
    texts.append(line.label)
    if line.style == "client" or line.style.startswith("rival") or not known:
        return
    dots: dict[str, Any] = {"color": colour, "markersize": 8, "mec": _THEME["card"], "mew": 2, "clip_on": False}
    axes.plot(*zip(*known, strict=True), "o", gid=f"tips-{len(texts)}", **dots)
    texts += [f"{line.label}, round {index + first_round}: {value:.1f} %" for index, value in known]


def _write_ends(axes: Axes, lines: Sequence[Line], per_pixel: float) -> None:
    """Write last values beside their curves, moved apart where they would cover each other."""
    ends = [(100 * line.values[-1], line) for line in lines if line.style != "client" and line.values[-1] is not None]
    highest = float("inf")
    for value, line in sorted(ends, key=lambda end: -end[0]):
        highest = min(value, highest - 100 * per_pixel * _ROW)
        at = (len(line.values) - 1, highest)
        axes.annotate(
            f"{value:.1f}", at, (10, -5), textcoords="offset pixels", annotation_clip=False,
            color=_THEME[_COLOURS[line.style]], fontsize=16, fontweight="bold",
        )  # fmt: skip


def _for_a_page(svg: str, title: str, texts: Sequence[str]) -> str:
    """Return the drawing with the page's font and colours, and with what to show to whoever points at it."""
    name = html.escape(title)
    head = rf'<svg viewBox="\1" role="img" aria-label="{name}"><title>{name}</title>'
    for pattern, new in (
        (r"^.*?<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>", head),
        (r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", ""),
        (r'<g id="(?!tips?-)[^"]*"', "<g"),  # nothing refers to them, and a page has several drawings
        (r"; font-family: [^;\"]*", ""),
        (r"font: (?:\w+ )*([\d.]+px)[^;\"]*", r"font-size: \1"),  # older Matplotlib
        (r"\s*\n\s*", "\n"),
    ):
        svg = re.sub(pattern, new, svg, flags=re.DOTALL)

    def told(index: int) -> str:
        return f"<g><title>{html.escape(texts[index])}</title>"

    def each(dots: re.Match[str]) -> str:
        index = itertools.count(int(dots[1]))
        return "<g" + re.sub(r"<use [^>]*/>", lambda use: f"{told(next(index))}{use[0]}</g>", dots[2])

    svg = re.sub(r'<g id="tip-(\d+)">', lambda found: told(int(found[1])), svg)
    svg = re.sub(r'<g id="tips-(\d+)"(>.*?</g>)', each, svg, flags=re.DOTALL)
    for variable, colour in _THEME.items():
        svg = svg.replace(colour, f"var(--{variable}, {colour})")
    return svg.strip()
