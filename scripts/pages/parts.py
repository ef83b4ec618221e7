"""What all reports are made of: the page around, sections, tiles."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def document(title: str, headline: str, lead: str, sections: Iterable[str]) -> str:
    """Return a whole page without external resources.

    Args:
        title: of the page, plain text.
        headline: what it says, HTML.
        lead: what else, HTML.
        sections: HTML.
    """
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    name = html.escape(title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{name}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f'<header><p class="over">{name}</p><h1>{glued(headline)}</h1>\n'
        f'<p class="lead">{glued(lead)}</p></header>\n' + "\n".join(sections) + "\n</main>\n</body>\n</html>\n"
    )


def glued(text: str) -> str:
    """Keep numbers and their units on one line."""
    return re.sub(r"(?<=\d) (?=(MB|kB|%|ms|points)(\W|$))", "\N{NO-BREAK SPACE}", text)


def section(name: str, title: str, intro: str, body: str) -> str:
    """Return a section that a link can name."""
    return f'<section id="{name}"><h2>{title}</h2><p class="intro">{glued(intro)}</p>\n{body}</section>'


def tiles(found: Sequence[tuple[str, str, str]]) -> str:
    """Return large numbers in a row: (number, what it is, CSS class)."""
    cells = "".join(f'<div class="tile {kind}"><b>{value}</b><span>{text}</span></div>' for value, text, kind in found)
    return f'<div class="tiles">{cells}</div>'


def definitions(title: str, values: Iterable[tuple[str, str]]) -> str:
    """Return a block of names and values."""
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in values)
    return f"<div><h3>{html.escape(title)}</h3><dl>{rows}</dl></div>"
