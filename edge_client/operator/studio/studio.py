"""What the studio knows and does, whoever asks: newest pictures, frames that wait, labels and taking them back."""

from __future__ import annotations

import collections
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import LabelProgress, Shown
from replayfleet.edge_client.learning.labels.operators_word import (
    IN_A_ROUND,
    AnyFeedback,
    BoxFeedback,
    Feedback,
    FeedbackRefused,
    NamedBox,
    TakeBack,
)
from replayfleet.edge_client.operator.studio.waiting import Waiting, WaitingFrames

MAX_UNDO = 50
MAX_WIDTH = 960
"""Of a picture that a browser gets, in pixels."""
_SIZES = ((1.0, 80), (1.0, 50), (0.5, 60), (0.25, 50))
"""Shares of the width, and qualities: what is tried, the first that fits."""
_MARK = (255, 176, 0)


@dataclass(frozen=True, slots=True)
class Known:
    """What the client says of itself now.

    Attributes:
        client: its name.
        class_names: of the fleet's task; empty until it is known.
        round: announced last; -1 before the first.
        version: that serves.
        labels: what waits for the next round; None where the source doesn't count.
        max_boxes: of one picture, where the fleet learns boxes; None where it learns classes.
    """

    client: str
    class_names: Sequence[str]
    round: int
    version: int
    labels: LabelProgress | None
    max_boxes: int | None = None


class Studio:
    """Safe across threads; encodes a picture when somebody asks for it, and never otherwise.

    Args:
        known: what the client says of itself.
        learn: takes a label and the frame that it is about; raises FeedbackRefused.
        keep_s: seconds that frames wait, and can be labelled.
        clock: ``time.monotonic``.

    Attributes:
        session: tells this start of the client from others, whose frames have the same numbers.
    """

    def __init__(
        self,
        known: Callable[[], Known],
        learn: Callable[[AnyFeedback, Shown], TakeBack],
        keep_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.session = secrets.token_hex(8)
        self._known = known
        self._learn = learn
        self._clock = clock
        self._frames = WaitingFrames(keep_s)
        self._newest: dict[str, tuple[Shown, float]] = {}  # and when it came
        self._saying = threading.Lock()  # whoever finds a frame labels it, and nobody else
        self._done: collections.deque[tuple[Waiting, str, TakeBack]] = collections.deque(maxlen=MAX_UNDO)

    def watch(self, shown: Shown) -> None:
        """Take note of a picture; called on the serving thread."""
        now = self._clock()
        self._newest[shown.picture.camera] = shown, now
        self._frames.offer(shown, now)

    def state(self) -> dict[str, Any]:
        """What the page shows beside pictures."""
        known, now, done = self._known(), self._clock(), self._done.copy()
        names, waiting = known.class_names, self._frames.unsure_first(now)
        progress = known.labels
        return {
            "session": self.session,
            "client": known.client,
            "classes": list(names),
            "max_boxes": known.max_boxes,
            "round": known.round,
            "version": known.version,
            "labels": None
            if progress is None
            else {
                "have": progress.num_samples,
                "need": progress.min_samples,
                "pictures": progress.num_pictures,
                "need_pictures": progress.min_pictures,
            },
            "cameras": [
                {
                    "name": name,
                    "frame": shown.picture.frame_id,
                    "age_s": round(now - at, 1),
                    "answers": _said(shown, names),
                }
                for name, (shown, at) in sorted(self._newest.copy().items())
            ],
            "keep_s": self._frames.keep_s,
            "num_waiting": len(waiting),
            "waiting": [self._waiting(one, known, now) for one in waiting[:12]],
            "undo": done[-1][1] if done else "",
        }

    def _waiting(self, one: Waiting, known: Known, now: float) -> dict[str, Any]:
        said = _said(one.shown, known.class_names)
        return {
            "camera": one.key[0],
            "frame": one.key[1],
            "left_s": round(self._frames.keep_s - (now - one.at), 1),
            "answer": next(iter(said[one.index :]), None),
            **({} if known.max_boxes is None else {"size": one.shown.picture.size, "found": said[: known.max_boxes]}),
        }

    def label(self, camera: str, frame_id: int, class_name: str) -> None:
        """Learn what the object of a waiting frame is.

        Raises:
            FeedbackRefused: The frame doesn't wait any more, or the label can't be used.
        """
        with self._saying:
            frame = self._found(camera, frame_id)
            self._learned(frame, class_name, Feedback(camera, frame_id, class_name, frame.index))

    def label_boxes(self, camera: str, frame_id: int, boxes: Sequence[NamedBox]) -> None:
        """Learn that these things, and no others, are to be seen in a waiting frame.

        Raises:
            FeedbackRefused: The frame doesn't wait any more, or the boxes can't be used.
        """
        with self._saying:
            frame = self._found(camera, frame_id)
            self._learned(frame, boxes_said(len(boxes)), BoxFeedback(camera, frame_id, tuple(boxes)))

    def _found(self, camera: str, frame_id: int) -> Waiting:
        frame = self._frames.find((camera, frame_id), self._clock())
        if frame is None:
            raise FeedbackRefused(
                f"frame {frame_id} of {camera!r} doesn't wait any more; frames wait for {self._frames.keep_s:g} s"
            )
        return frame

    def _learned(self, frame: Waiting, said: str, feedback: AnyFeedback) -> None:
        take_back = self._learn(feedback, frame.shown)
        self._frames.remove(frame.key)
        self._done.append((frame, said, take_back))

    def skip(self, camera: str, frame_id: int) -> None:
        """Nobody wants to label this frame. Idempotent."""
        self._frames.remove((camera, frame_id))

    def undo(self) -> str:
        """Take the newest label back; returns what it said.

        Raises:
            FeedbackRefused: There is none, its round has begun, or it isn't there any more.
        """
        try:
            frame, said, take_back = self._done.pop()
        except IndexError:
            raise FeedbackRefused("there is no label to take back") from None
        if kept := take_back():
            if kept == IN_A_ROUND:
                self._done.clear()  # those before it are in that round too
            raise FeedbackRefused(f"the label {said!r} {kept}")
        self._frames.put_back(frame, self._clock())
        return said

    def frozen(self, camera: str, frame_id: int, max_bytes: int | None = None) -> bytes | None:
        """Return a waiting frame as JPEG, with the object that is asked about marked; None if it is gone.

        A detector's is bare: the page draws its boxes, which whoever labels may move.
        """
        frame = self._frames.find((camera, frame_id), self._clock())
        if frame is None:
            return None
        corners = answered_corners(frame.shown) if frame.shown.inputs.size is None else None
        asked = None if corners is None else corners[frame.index : frame.index + 1]
        return jpeg(frame.shown.picture.pixels, asked, max_bytes)

    def newest(self, camera: str, max_bytes: int | None = None) -> tuple[int, Callable[[], bytes]] | None:
        """Return a camera's newest frame number, and what makes its JPEG; None before its first picture."""
        if camera not in self._newest:
            return None
        shown, _ = self._newest[camera]
        return shown.picture.frame_id, lambda: jpeg(shown.picture.pixels, answered_corners(shown), max_bytes)


def boxes_said(count: int) -> str:
    """Return how many boxes were learned, in words."""
    return {0: "nothing to be seen", 1: "1 box"}.get(count, f"{count} boxes")


def jpeg(
    pixels: NDArray[np.uint8],
    corners: NDArray[np.float32] | None = None,
    max_bytes: int | None = None,
    max_width: int = MAX_WIDTH,
) -> bytes:
    """Return a picture (H, W, 3) RGB as JPEG, at most ``max_width`` wide, with boxes (N, 4) in its pixels.

    With ``max_bytes`` it is made smaller until it fits; empty if that can't be.
    """
    import cv2

    scale = min(1.0, max_width / pixels.shape[1])
    bgr = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    for shrink, quality in _SIZES:
        size = scale * shrink
        shape = max(1, round(size * bgr.shape[1])), max(1, round(size * bgr.shape[0]))
        drawn = cv2.resize(bgr, shape, interpolation=cv2.INTER_AREA) if size < 1 else bgr.copy()
        for left, top, right, bottom in () if corners is None else (corners * size).round().astype(int).tolist():
            cv2.rectangle(drawn, (left, top), (right, bottom), _MARK[::-1], 2)
        data = bytes(cv2.imencode(".jpg", drawn, (cv2.IMWRITE_JPEG_QUALITY, quality))[1])
        if max_bytes is None or len(data) <= max_bytes:
            return data
    return b""


def answered_corners(shown: Shown) -> NDArray[np.float32] | None:
    """Return the boxes (N, 4) of a picture's answers, or of what it asks; None where all of it is meant."""
    return shown.inputs.corners if shown.prediction is None else shown.prediction.answers.corners


def _said(shown: Shown, names: Sequence[str]) -> list[dict[str, Any]]:
    if shown.prediction is None:
        return []
    answers = shown.prediction.answers
    return [
        {
            "class": names[id_] if 0 <= id_ < len(names) else str(id_),
            "confidence": round(float(sure), 4),
            **({} if answers.corners is None else {"box": [round(x, 1) for x in answers.corners[index].tolist()]}),
        }
        for index, (id_, sure) in enumerate(zip(answers.class_ids.tolist(), answers.confidences, strict=True))
    ]
