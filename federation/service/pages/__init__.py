"""Pages: one HTML file each, without external resources, in light and dark. Jinja2 is imported when one is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayfleet.federation.service import words

if TYPE_CHECKING:
    from markupsafe import Markup

_FILTERS = (words.percent, words.megabytes, words.milliseconds, words.clock, words.short_name, words.spaced)


def render(template: Path, **facts: Any) -> str:
    """Return a page; whatever the facts hold is escaped.

    Args:
        template: extends ``base.html``, whose folder it needn't lie in, and may use ``parts.html``.
        facts: what the template speaks of.
    """
    import jinja2

    loader = jinja2.FileSystemLoader([template.parent, Path(__file__).parent])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update({given.__name__: given for given in _FILTERS}, glued=_glued)
    return environment.get_template(template.name).render(**facts)


def _glued(text: object) -> Markup:
    """Keep numbers and their units on one line."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<=\d) (?=(MB|kB|%|ms|points)(\W|$))", "\N{NO-BREAK SPACE}", escape(text)))  # noqa: S704
