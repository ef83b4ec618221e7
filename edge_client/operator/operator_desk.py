"""What an operator of one client can ask and say: the newest predictions, and what a frame really shows.

Over HTTP, and the second one over MQTT too, on the client's ``feedback`` topic with the same JSON.
``GET /predictions`` -> ``{"session": "9f2c...", "cameras": {"front": {"frame": 812, "version": 7, "answers": [...]}}}``
``POST /feedback`` with ``{"camera": "front", "frame": 812, "class": "cat", "object": 0}`` -> ``{"accepted": true}``
With ``"session"`` a word counts for that start of the client alone: frames are numbered from 0 anew at each.
Where boxes are learned, all of the frame's: ``{"frame": 812, "boxes": [{"class": "cat", "box": [10, 20, 90, 60]}]}``
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from replayfleet.edge_client.flow import Prediction, Shown
from replayfleet.edge_client.learning.labels.operators_word import (
    AnyFeedback,
    BoxFeedback,
    Feedback,
    FeedbackRefused,
    NamedBox,
)
from replayfleet.federation.errors import UNREADABLE
from replayfleet.federation.service.health import MAX_BODY_BYTES, Answer


class BoxBody(msgspec.Struct, forbid_unknown_fields=True):
    """One of the boxes that are posted, written as ``GET /predictions`` writes answers."""

    class_name: str = msgspec.field(name="class")
    box: tuple[float, float, float, float]


class FeedbackBody(msgspec.Struct, forbid_unknown_fields=True):
    """What is posted: a class or boxes. ``camera`` may be left out where there is one; ``object`` with one answer."""

    frame: int
    class_name: str | None = msgspec.field(name="class", default=None)
    camera: str = ""
    object: int | None = None
    boxes: list[BoxBody] | None = None
    session: str = ""


_decoder = msgspec.json.Decoder(FeedbackBody)


class OperatorDesk:
    """Remembers the newest prediction of every camera; safe across threads.

    Args:
        class_names: of the task, once it is known.
        learn: takes feedback; raises FeedbackRefused.
        clock: ``time.monotonic``.
    """

    def __init__(
        self,
        class_names: Callable[[], Sequence[str]],
        learn: Callable[[AnyFeedback], object],
        clock: Callable[[], float],
    ) -> None:
        self._class_names = class_names
        self._learn = learn
        self._clock = clock
        self._session = secrets.token_hex(8)
        self._newest: dict[str, Prediction] = {}

    def watch(self, shown: Shown) -> None:
        if shown.prediction is not None:
            self._newest[shown.prediction.camera] = shown.prediction

    def predictions(self, body: bytes) -> Answer:
        names, now = self._class_names(), self._clock()
        newest = sorted(self._newest.copy().items())
        cameras = {camera: _as_json(found, names, now) for camera, found in newest}
        return HTTPStatus.OK, {"session": self._session, "cameras": cameras}

    def take(self, body: bytes) -> None:
        """Learn from feedback as it travels.

        Raises:
            FeedbackRefused: It is no feedback, or can't be used; says why.
        """
        if len(body) > MAX_BODY_BYTES:
            raise FeedbackRefused(f"feedback of {len(body)} bytes, expected at most {MAX_BODY_BYTES}")
        try:
            said = _decoder.decode(body)
        except UNREADABLE as error:
            raise FeedbackRefused(f"feedback isn't usable: {str(error).replace('`', '')}") from error
        if said.session not in {"", self._session}:
            raise FeedbackRefused("the client was restarted since this frame was answered; nothing was learned of it")
        self._learn(_understood(said))

    def feedback(self, body: bytes) -> Answer:
        try:
            self.take(body)
        except FeedbackRefused as refused:
            return HTTPStatus.UNPROCESSABLE_ENTITY, {"accepted": False, "error": str(refused)}
        return HTTPStatus.OK, {"accepted": True}


def _understood(said: FeedbackBody) -> AnyFeedback:
    if said.class_name is not None and said.boxes is None:
        return Feedback(said.camera, said.frame, said.class_name, said.object)
    if said.boxes is None:
        raise FeedbackRefused("feedback isn't usable: it names neither a class nor boxes")
    if said.class_name is not None or said.object is not None:
        raise FeedbackRefused("feedback isn't usable: it brings boxes, which have classes of their own")
    boxes = tuple(NamedBox(box.class_name, box.box) for box in said.boxes)
    return BoxFeedback(said.camera, said.frame, boxes)


def _as_json(prediction: Prediction, names: Sequence[str], now: float) -> dict[str, Any]:
    answers = prediction.answers
    return {
        "frame": prediction.frame_id,
        "age_s": round(now - prediction.captured_at, 3),
        "version": prediction.model_version,
        **({"left_out": answers.num_left_out} if answers.num_left_out else {}),
        "answers": [
            {
                "class": names[class_id] if class_id < len(names) else str(class_id),
                "confidence": round(float(answers.confidences[index]), 4),
                **({} if answers.corners is None else {"box": [round(x, 1) for x in answers.corners[index].tolist()]}),
            }
            for index, class_id in enumerate(answers.class_ids.tolist())
        ],
    }
