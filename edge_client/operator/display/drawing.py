"""One picture with what the model said, what it really shows, how old it is, and which model it was.

Axes: H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Shown
from replayfleet.federation.wire.protocol.messages import spoken

MIN_WIDTH = 480
"""Smaller pictures are enlarged, so that there is room for words."""
MAX_ENLARGED = 1920
"""Pixels of a side that none is enlarged beyond: a thin picture would become gigabytes."""

_PALETTE = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (213, 94, 0),
    (204, 121, 167),
    (120, 160, 255),
    (170, 220, 120),
)
"""Okabe and Ito's colours, which colour-blind people tell apart, and two more; RGB."""

_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)
_BAR_HEIGHT = 26


@dataclass(frozen=True, slots=True)
class Legend:
    """What a drawing needs beside the picture.

    Attributes:
        class_names: of the task.
        camera_class_names: of the camera's own boxes.
        round: announced last; -1 before the first.
    """

    class_names: Sequence[str]
    camera_class_names: Sequence[str]
    round: int


def drawn(shown: Shown, legend: Legend) -> NDArray[np.uint8]:
    """Return the picture with boxes and a line of text, (H, W, 3) uint8 RGB, H and W even.

    Answers stand above a box in their class's colour. Annotated boxes are thin and white; their class stands below
    where it isn't the answer's, so that only mistakes and what wasn't asked have two words.
    """
    import cv2

    pixels = shown.picture.pixels
    scale = max(1, min(-(-MIN_WIDTH // pixels.shape[1]), MAX_ENLARGED // max(pixels.shape[:2])))
    if scale > 1:
        pixels = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
    canvas = pixels.copy()
    boxes = shown.picture.boxes
    if boxes is not None:
        said = _said(shown, legend)
        for index, (corners, class_id) in enumerate(zip(boxes.corners * scale, boxes.class_ids.tolist(), strict=True)):
            _box(cv2, canvas, corners, _WHITE, 1)
            truth = _name(legend.camera_class_names, class_id)
            if said.get(index) != truth:
                _word(cv2, canvas, truth, corners[0], corners[3] + 11, _WHITE)
    if shown.prediction is not None:
        _answers(cv2, canvas, shown, legend, scale)
    return _with_bar(cv2, canvas, _line(shown, legend))


def _said(shown: Shown, legend: Legend) -> dict[int, str]:
    """Annotated box -> the class that the model gave to it."""
    if shown.prediction is None or shown.inputs.box_indices is None:
        return {}
    classes = [_name(legend.class_names, class_id) for class_id in shown.prediction.answers.class_ids.tolist()]
    return dict(zip(shown.inputs.box_indices.tolist(), classes, strict=True))


def _answers(cv2: Any, canvas: NDArray[np.uint8], shown: Shown, legend: Legend, scale: int) -> None:
    assert shown.prediction is not None
    answers = shown.prediction.answers
    for index, class_id in enumerate(answers.class_ids.tolist()):
        colour = _PALETTE[class_id % len(_PALETTE)]
        text = f"{_name(legend.class_names, class_id)} {answers.confidences[index]:.2f}"
        if answers.corners is None:
            _word(cv2, canvas, text, 6.0, 20.0, colour)
            continue
        corners = answers.corners[index] * scale
        _box(cv2, canvas, corners, colour, 2)
        _word(cv2, canvas, text, corners[0], corners[1] - 4, colour)


def _line(shown: Shown, legend: Legend) -> str:
    picture, prediction = shown.picture, shown.prediction
    if prediction is None:
        said = "no model yet"
    else:
        said = f"model v{spoken(prediction.model_version)}  age {1000 * prediction.age_s:.0f} ms"
    place = f"  {picture.place}" if picture.place else ""
    round_text = str(legend.round) if legend.round >= 0 else "-"
    return f"{picture.camera}{place}  frame {picture.frame_id}  {said}  round {round_text}"


def _name(names: Sequence[str], class_id: int) -> str:
    return names[class_id] if 0 <= class_id < len(names) else f"class {class_id}"


def _box(
    cv2: Any, canvas: NDArray[np.uint8], corners: NDArray[np.float32], colour: tuple[int, int, int], thickness: int
) -> None:
    height, width = canvas.shape[:2]  # an edge of the picture lies beyond its last pixel
    inside = np.clip(corners, 0, (width - 1, height - 1, width - 1, height - 1))
    left, top, right, bottom = (round(float(value)) for value in inside)
    cv2.rectangle(canvas, (left, top), (right, bottom), colour, thickness)


def _word(
    cv2: Any, canvas: NDArray[np.uint8], text: str, left: float, baseline: float, colour: tuple[int, int, int]
) -> None:
    height, width = canvas.shape[:2]
    font, size = cv2.FONT_HERSHEY_SIMPLEX, 0.42
    (text_width, text_height), _ = cv2.getTextSize(text, font, size, 1)
    x = int(np.clip(round(float(left)), 0, max(0, width - text_width)))
    y = int(np.clip(round(float(baseline)), text_height + 1, height - 2))
    cv2.rectangle(canvas, (x, y - text_height - 2), (x + text_width, y + 3), _BLACK, cv2.FILLED)
    cv2.putText(canvas, text, (x, y), font, size, colour, 1, cv2.LINE_AA)


def _with_bar(cv2: Any, canvas: NDArray[np.uint8], text: str) -> NDArray[np.uint8]:
    height, width = canvas.shape[:2]
    framed = np.zeros((2 * ((height + _BAR_HEIGHT + 1) // 2), 2 * ((width + 1) // 2), 3), np.uint8)
    framed[:height, :width] = canvas
    cv2.putText(framed, text, (6, height + 18), cv2.FONT_HERSHEY_SIMPLEX, 0.45, _WHITE, 1, cv2.LINE_AA)
    return framed
