"""Pages: one HTML file each, without external resources, in light and dark. Jinja2 and OpenCV come when needed."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import ReplayfleetError
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


def picture_uri(pixels: NDArray[np.uint8], kind: str = ".png") -> str:
    """Return a picture within a URI.

    Args:
        pixels: (H, W, C) uint8, grey or RGB.
        kind: ``.png``, or ``.jpg`` for photographs.

    Raises:
        ReplayfleetError: It can't be encoded.
    """
    import cv2

    options = [cv2.IMWRITE_JPEG_QUALITY, 82] if kind == ".jpg" else []  # OpenCV complains of another format's options
    done, encoded = cv2.imencode(kind, np.ascontiguousarray(pixels[..., ::-1]), options)
    if not done:
        raise ReplayfleetError(f"a picture of shape {pixels.shape} can't be encoded as {kind}")
    return f"data:image/{kind[1:].replace('jpg', 'jpeg')};base64,{base64.b64encode(encoded.tobytes()).decode()}"


def contact_sheet(images: NDArray[np.float32], num_columns: int, num_rows: int) -> NDArray[np.uint8]:
    """Return images (B, C, H, W) in [-1, 1] as one (rows x H, columns x W, C) uint8; places without an image are 0."""
    _, channels, height, width = images.shape
    sheet = np.zeros((num_rows * height, num_columns * width, channels), np.uint8)
    pixels = np.clip(np.rint((images + 1) * 127.5), 0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    for index, picture in enumerate(pixels[: num_rows * num_columns]):
        top, left = index // num_columns * height, index % num_columns * width
        sheet[top : top + height, left : left + width] = picture
    return sheet


def _glued(text: object) -> Markup:
    """Keep numbers and their units on one line."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<=\d) (?=(MB|kB|%|ms|points)(\W|$))", "\N{NO-BREAK SPACE}", escape(text)))  # noqa: S704
