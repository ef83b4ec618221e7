"""The console's charts: those of the report, with nothing that a strict content policy forbids."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

from replayfleet.federation.service.pages.charts import Line, line_chart

WIDE, NARROW = (1060, 300), (340, 240)
MAX_DRAWN, MAX_WAITING = 512, 64
_STYLE = re.compile(r' style="([^"]*)"')
_drawing = threading.Lock()
"""Matplotlib's settings are the process's."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Shares over rounds that a page shows.

    Attributes:
        place: where; a newer chart of the same place follows it.
        title: what it shows, for those who don't see it.
        lines: (label, shares in [0, 1] round by round, style of a ``Line``).
        first_round: of the lines.
    """

    place: str
    title: str
    lines: tuple[tuple[str, tuple[float | None, ...], str], ...]
    first_round: int


class Charts:
    """Draws on a thread of its own, for a chart takes longer than a page may; each is drawn once.

    Args:
        drawn: is called there when one is done, so that pages can be made anew.
    """

    def __init__(self, drawn: Callable[[], None] = lambda: None) -> None:
        self._drawn = drawn
        self._done: OrderedDict[Chart, Markup] = OrderedDict()
        self._newest: OrderedDict[str, Markup] = OrderedDict()
        self._waiting: dict[str, Chart] = {}
        self._something = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="charts", daemon=True)

    def svg(self, chart: Chart) -> Markup:
        """Return it for wide and for narrow windows; until it is drawn the one before, of which there may be none."""
        with self._something:
            if chart in self._done:
                self._done.move_to_end(chart)
                return self._done[chart]
            if chart.place in self._waiting or len(self._waiting) < MAX_WAITING:
                self._waiting[chart.place] = chart
                self._something.notify()
                if self._thread.ident is None:
                    self._thread.start()
            return self._newest.get(chart.place, Markup())

    def _work(self) -> None:
        while True:
            with self._something:
                self._something.wait_for(lambda: self._waiting)
                chart = self._waiting.pop(next(iter(self._waiting)))
            svg = draw(chart)
            with self._something:
                for kept, key in ((self._done, chart), (self._newest, chart.place)):
                    kept[key] = svg  # type: ignore[index]
                    if len(kept) > MAX_DRAWN:
                        kept.popitem(last=False)
            self._drawn()


def draw(chart: Chart) -> Markup:
    """Return both of a chart's drawings as SVG."""
    lines, drawn = [Line(*line) for line in chart.lines], []
    for kind, size in (("wide", WIDE), ("narrow", NARROW)):
        with _drawing:
            svg = line_chart(lines, changes=(), size=size, title=chart.title, first_round=chart.first_round)
        drawn.append(f'<div class="{kind}">{_STYLE.sub(_attributes, svg)}</div>')
    return Markup("".join(drawn))  # noqa: S704 - the chart escapes its words


def _attributes(style: re.Match[str]) -> str:
    """Return declarations as attributes, which need no ``unsafe-inline``; SVG knows all that Matplotlib writes."""
    pairs = (declaration.split(":", 1) for declaration in style[1].split(";") if ":" in declaration)
    return "".join(f' {name.strip()}="{value.strip()}"' for name, value in pairs)
