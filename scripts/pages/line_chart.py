"""Accuracy over rounds as inline SVG; its colours are the page's, so it follows light and dark."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 58, 14, 38
_GRID = (0, 25, 50, 75, 100)
_LABEL_GAP = 17
_LETTER_WIDTH = 7.3
"""Of the labels' 13 pixels, on the average."""
_LABEL_FOOT = 8
"""From the drawing to the lowest label's baseline; last values stand beside curves that end near 100 %."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve.

    Attributes:
        label: what a reader sees when pointing at it.
        values: shares in [0, 1], one per round; None where nothing was measured.
        style: CSS class.
        has_end: write its last value beside it.
    """

    label: str
    values: Sequence[float | None]
    style: str
    has_end: bool = True


def line_chart(
    lines: Sequence[Line],
    *,
    changes: Sequence[int],
    change_name: str,
    size: tuple[int, int],
    title: str = "Accuracy after each round",
    places: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """Return an SVG element; the lines later in the list are drawn on top.

    Args:
        lines: at least one, with equally many rounds.
        changes: rounds before which the stream changes.
        change_name: what happens there.
        size: (width, height) of the drawing; text keeps its size.
        title: what the drawing shows.
        places: round -> a word that stands over the drawing where the stream enters a place in that round.
    """
    num_rounds = max(len(line.values) for line in lines)
    entered = {index: name for index, name in sorted(places.items()) if index < num_rounds}
    rows = _rows(_Frame(size, num_rounds), entered, changes)
    band = _LABEL_GAP * (1 + max(rows.values())) + _LABEL_FOOT - 5 if rows else 0
    frame = _Frame(size, num_rounds, _TOP + band)
    parts = [_grid(frame)]
    parts += [_change(frame, index, change_name, rows.get(index)) for index in changes if index < num_rounds]
    parts += [_place(frame, index, name, rows[index]) for index, name in entered.items()]
    parts += [_curve(frame, line) for line in lines]
    parts += _ends(frame, lines)
    width, height = size
    name = html.escape(title)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{name}">'
        f"<title>{name}</title>{''.join(parts)}</svg>"
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    size: tuple[int, int]
    num_rounds: int
    top: float = _TOP

    def x(self, index: float) -> float:
        width = self.size[0] - _LEFT - _RIGHT
        return _LEFT + width * (index / max(1, self.num_rounds - 1) if self.num_rounds > 1 else 0.5)

    def y(self, share: float) -> float:
        return self.top + (self.size[1] - self.top - _BOTTOM) * (1 - share)

    def label_x(self, index: int) -> float:
        """Where a label of this round begins: right of its line, which stands half a round before."""
        return max(float(_LEFT), self.x(index - 0.5) + 6)

    def shortened(self, index: int, name: str) -> str:
        """Return as much of a label as there is room for up to the drawing's edge."""
        room = int((self.size[0] - self.label_x(index)) / _LETTER_WIDTH)
        return name if len(name) <= room else f"{name[: max(1, room - 1)]}…"


def _grid(frame: _Frame) -> str:
    parts = []
    right, bottom = frame.size[0] - _RIGHT, frame.size[1] - _BOTTOM
    for level in _GRID:
        y = frame.y(level / 100)
        style = "axis" if level == 0 else "grid"
        parts.append(f'<line class="{style}" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{level} %</text>')
    parts += [
        f'<text class="tick" x="{frame.x(index):.1f}" y="{bottom + 18}" text-anchor="middle">{index}</text>'
        for index in _ticks(frame.num_rounds)
    ]
    middle = (_LEFT + right) / 2
    parts.append(f'<text class="tick" x="{middle:.1f}" y="{bottom + 34}" text-anchor="middle">round</text>')
    return "".join(parts)


def _ticks(num_rounds: int) -> list[int]:
    step = max(1, -(-num_rounds // 12))
    return list(range(0, num_rounds, step))


def _rows(frame: _Frame, places: Mapping[int, str], changes: Sequence[int]) -> dict[int, int]:
    """Return round -> row of its label, counted upwards from the drawing.

    A line ends under its own label, so a label may reach over later lines if it stands higher than theirs.
    """
    rows: dict[int, int] = {}
    for index in sorted({*places, *changes}, reverse=True):
        name = frame.shortened(index, places[index]) if index in places else ""
        end = frame.label_x(index) + _LETTER_WIDTH * len(name)
        reached = [row for later, row in rows.items() if frame.x(later - 0.5) - 4 < end]
        rows[index] = 1 + max(reached, default=-1) if name else -1
    return {index: row for index, row in rows.items() if row >= 0}


def _change(frame: _Frame, index: int, name: str, row: int | None) -> str:
    """A line up to the label of its round, if there is one."""
    x = frame.x(index - 0.5)
    top, bottom = frame.y(1) if row is None else _baseline(frame, row) + 5 - _LABEL_GAP, frame.y(0)
    return (
        f'<line class="change" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}">'
        f"<title>{html.escape(name)}</title></line>"
    )


def _place(frame: _Frame, index: int, name: str, row: int) -> str:
    """A word over the drawing, beside the upper end of its line; all of it is seen by pointing at it."""
    y = _baseline(frame, row)
    shown, whole = html.escape(frame.shortened(index, name)), html.escape(name)
    return f'<text class="tick place" x="{frame.label_x(index):.1f}" y="{y:.1f}">{shown}<title>{whole}</title></text>'


def _baseline(frame: _Frame, row: int) -> float:
    return frame.top - _LABEL_FOOT - _LABEL_GAP * row


def _curve(frame: _Frame, line: Line) -> str:
    points = [(frame.x(i), frame.y(value), i, value) for i, value in enumerate(line.values) if value is not None]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
    label = html.escape(line.label)
    parts = [f'<polyline class="curve {line.style}" points="{path}"><title>{label}</title></polyline>']
    if line.has_end:
        parts += [
            f'<circle class="dot {line.style}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
            f"<title>{label}, round {i}: {100 * value:.1f} %</title></circle>"
            for x, y, i, value in points
        ]
    return "".join(parts)


def _ends(frame: _Frame, lines: Sequence[Line]) -> list[str]:
    """Last values, moved apart where they would cover each other."""
    ends = [(frame.y(line.values[-1]), line) for line in lines if line.has_end and line.values[-1] is not None]
    ends.sort(key=lambda end: end[0])
    parts, lowest = [], float("-inf")
    for y, line in ends:
        lowest = max(y, lowest + _LABEL_GAP)
        last = line.values[-1] or 0.0
        x = frame.x(len(line.values) - 1) + 10
        parts.append(f'<text class="end {line.style}" x="{x:.1f}" y="{lowest + 5:.1f}">{100 * last:.1f}</text>')
    return parts
