"""The console's charts: those of the report, with nothing that a strict content policy forbids."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from functools import lru_cache

from markupsafe import Markup

from replayfleet.federation.service.charts import Line, line_chart

WIDE, NARROW = (1060, 300), (340, 240)
_STYLE = re.compile(r' style="([^"]*)"')
_drawing = threading.Lock()
"""Matplotlib's settings are the process's."""


def shares_chart(title: str, lines: Sequence[tuple[str, Sequence[float | None], str]], first_round: int) -> Markup:
    """Return shares over rounds as SVG, for wide and for narrow windows; equal ones are drawn once.

    Args:
        title: what it shows, for those who don't see it.
        lines: (label, shares in [0, 1] round by round, style of a ``Line``).
        first_round: of the lines.
    """
    return _drawn(title, tuple((label, tuple(values), style) for label, values, style in lines), first_round)


def warm() -> None:
    """Import what draws, so that the first page doesn't wait for it."""
    shares_chart("", [("", [0.5], "own")], 0)


@lru_cache(maxsize=512)
def _drawn(title: str, lines: tuple[tuple[str, tuple[float | None, ...], str], ...], first_round: int) -> Markup:
    found = [Line(*line) for line in lines]
    drawn = []
    for kind, size in (("wide", WIDE), ("narrow", NARROW)):
        with _drawing:
            svg = line_chart(found, changes=(), size=size, title=title, first_round=first_round)
        drawn.append(f'<div class="{kind}">{_STYLE.sub(_attributes, svg)}</div>')
    return Markup("".join(drawn))  # noqa: S704 - the chart escapes its words


def _attributes(style: re.Match[str]) -> str:
    """Return declarations as attributes, which need no ``unsafe-inline``; SVG knows all that Matplotlib writes."""
    pairs = (declaration.split(":", 1) for declaration in style[1].split(";") if ":" in declaration)
    return "".join(f' {name.strip()}="{value.strip()}"' for name, value in pairs)
