"""The values that flow through a client, in the order in which they come to be; this file imports no neighbour.

camera -> ``Picture`` -> ``Inputs`` -> the served model -> ``Answers`` -> ``Prediction`` -> ``Shown`` -> ``Samples``.
Axes: B inputs of a picture or samples of a batch, C channels, H height, W width, K classes, N boxes or answers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray


def _equal(one: Any, other: object) -> bool:
    """Whether they are equal records; NumPy would ask which number of an array is meant."""
    names = [each.name for each in fields(one)]
    return type(one) is type(other) and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@dataclass(frozen=True, slots=True)
class Boxes:
    """What is to be seen in a picture, and where.

    Attributes:
        corners: (N, 4) float32, left, top, right, bottom in pixels, left < right and top < bottom; they may reach past
            the picture's edge.
        class_ids: (N,) int64, indices into the camera's ``class_names``.
    """

    corners: NDArray[np.float32]
    class_ids: NDArray[np.int64]

    __eq__ = _equal

    def __post_init__(self) -> None:
        if self.corners.ndim != 2 or self.corners.shape[1] != 4 or self.corners.dtype != np.float32:
            raise ValueError(f"corners must be (N, 4) float32, got {self.corners.shape} {self.corners.dtype}")
        if self.class_ids.shape != (len(self.corners),) or self.class_ids.dtype != np.int64:
            raise ValueError(
                f"class_ids must be ({len(self.corners)},) int64, got {self.class_ids.shape} {self.class_ids.dtype}"
            )
        sizes = self.corners[:, 2:] - self.corners[:, :2]
        if not (np.isfinite(self.corners).all() and (sizes > 0).all()):
            raise ValueError("corners must be finite, with left < right and top < bottom")

    def __len__(self) -> int:
        return len(self.corners)

    @classmethod
    def none(cls) -> Boxes:
        """Return the annotation of a picture that shows nothing of interest."""
        return cls(np.empty((0, 4), np.float32), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Picture:
    """One image as a camera took it.

    Attributes:
        camera: name of the camera within its client.
        frame_id: rises with every picture that the camera took, those that nobody read included.
        pixels: (H, W, 3) uint8, RGB.
        captured_at: ``time.monotonic`` seconds at which the picture was taken, or read where nobody knows better.
        boxes: the annotation that came with it; None where there is none, which is not the same as no boxes.
        place: where it was taken, a town for example; empty where the camera doesn't know.
    """

    camera: str
    frame_id: int
    pixels: NDArray[np.uint8]
    captured_at: float
    boxes: Boxes | None = None
    place: str = ""

    __eq__ = _equal

    def __post_init__(self) -> None:
        if self.pixels.ndim != 3 or self.pixels.shape[2] != 3 or self.pixels.dtype != np.uint8:
            raise ValueError(f"pixels must be (H, W, 3) uint8, got {self.pixels.shape} {self.pixels.dtype}")

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        height, width, _ = self.pixels.shape
        return width, height


class CameraError(Exception):
    """A camera can't deliver now: unplugged, silent, refused, garbled. Whoever reads it tries again later."""


class Camera(Protocol):
    """One place that pictures come from."""

    name: str
    """Within its client; stands in every picture."""

    live: bool
    """Pictures come at their own pace and the newest wins; of a recording every picture is delivered."""

    class_names: tuple[str, ...]
    """What ``Boxes.class_ids`` mean; empty where the camera never annotates."""

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield pictures until ``stop`` is set or a recording ends; runs on a thread of its own.

        Of a live camera an end before ``stop`` is as a ``CameraError``.

        Raises:
            CameraError: It can't deliver now; iterating anew tries again.
        """

    def describe(self) -> str:
        """One line for logs, without passwords."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one picture asks the served model.

    Attributes:
        images: (B, C, H, W) float32 in [-1, 1]; B may be 0.
        corners: (B, 4) float32, left, top, right, bottom in pixels of the picture: what each input shows. None: B is 1
            and the input shows all of it.
        size: (width, height) of the picture; None where nothing depends on it.
        box_indices: (B,) int64, which of the picture's annotated boxes each input shows; None where it shows none.
        num_left_out: objects of the picture that ask nothing because it has too many.
    """

    images: NDArray[np.float32]
    corners: NDArray[np.float32] | None = None
    box_indices: NDArray[np.int64] | None = None
    size: tuple[int, int] | None = None
    num_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Answers:
    """What the served model said about one picture.

    Attributes:
        class_ids: (N,) int64, indices into the task's class names.
        confidences: (N,) float32, 0 to 1.
        corners: (N, 4) float32 in pixels of the picture; None where the one answer is about all of it.
        num_left_out: objects without an answer because the picture has too many; of a detector the most that it can be.
    """

    class_ids: NDArray[np.int64]
    confidences: NDArray[np.float32]
    corners: NDArray[np.float32] | None = None
    num_left_out: int = 0

    def __len__(self) -> int:
        return len(self.class_ids)

    @classmethod
    def none(cls) -> Answers:
        """Return what is said about a picture that asks nothing."""
        return cls(np.empty(0, np.int64), np.empty(0, np.float32), np.empty((0, 4), np.float32))


class View(Protocol):
    """How one task looks at pictures."""

    def inputs(self, picture: Picture) -> Inputs:
        """Return what the picture asks; runs on the serving thread, so it must be quick."""

    def answers(self, outputs: NDArray[np.float32], inputs: Inputs) -> Answers:
        """Return what the model's outputs (B, ...) mean.

        Raises:
            ValueError: They aren't finite, or not of the task's shape.
        """


def classified(logits: NDArray[np.float32], inputs: Inputs, among: Sequence[int] = ()) -> Answers:
    """Return the winning class of each input, with its softmax probability.

    Args:
        logits: (B, K).
        inputs: what was asked.
        among: class ids that alone may win, as where the task is known; all if there are none.

    Raises:
        ValueError: The logits (B, K) aren't finite, or not one row per input.
    """
    exact = logits.astype(np.float64)
    if exact.ndim != 2 or len(exact) != len(inputs.images):
        raise ValueError(f"logits have shape {logits.shape}, expected {len(inputs.images)} rows")
    if not np.isfinite(exact).all():
        raise ValueError("logits are not finite")
    if among:
        exact = exact[:, list(among)]
    winners = exact.argmax(axis=1)
    rows = np.arange(len(exact))
    shares = 1.0 / np.exp(exact - exact[rows, winners][:, None]).sum(axis=1)
    if among:
        winners = np.array(among)[winners]
    return Answers(winners.astype(np.int64), shares.astype(np.float32), inputs.corners, inputs.num_left_out)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One picture's answers.

    Attributes:
        camera: whose picture it is.
        frame_id: of the picture.
        answers: what the model said; of an empty picture nothing.
        model_version: the one version that answered.
        captured_at: ``time.monotonic`` seconds of the picture.
        answered_at: ``time.monotonic`` seconds of the answers.
    """

    camera: str
    frame_id: int
    answers: Answers
    model_version: int
    captured_at: float
    answered_at: float

    @property
    def age_s(self) -> float:
        """From capture to answer."""
        return self.answered_at - self.captured_at


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture that the loop dealt with.

    Attributes:
        picture: as the camera took it.
        inputs: what it asked the model.
        prediction: None while no model is served, or if the model failed on it.
    """

    picture: Picture
    inputs: Inputs
    prediction: Prediction | None


MAX_FRAME_RATE_HZ = 1000.0

Rate: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=MAX_FRAME_RATE_HZ)]
"""Pictures per second."""


@dataclass(frozen=True)  # without slots: what was said of a frame is known as long as its samples wait, and no longer
class Samples:
    """Labelled images.

    Attributes:
        images: (B, C, H, W) float32 in [-1, 1].
        labels: (B,) int64 class ids; for detection (B, M, 5) float32, see ``federation.streams.box_labels``.
    """

    images: NDArray[np.float32]
    labels: NDArray[Any]

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != np.float32:
            raise ValueError(f"images must be (B, C, H, W) float32, got {self.images.shape} {self.images.dtype}")
        if self.labels.ndim == 3:
            if self.labels.shape[::2] != (len(self.images), 5) or self.labels.dtype != np.float32:
                raise ValueError(
                    f"labels must be ({len(self.images)}, M, 5) float32, got {self.labels.shape} {self.labels.dtype}"
                )
        elif self.labels.shape != (len(self.images),) or self.labels.dtype != np.int64:
            raise ValueError(f"labels must be ({len(self.images)},) int64, got {self.labels.shape} {self.labels.dtype}")

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, slots=True)
class LabelProgress:
    """What waits for the next round.

    Attributes:
        num_samples: labelled samples that wait.
        min_samples: so many begin a round.
        num_pictures: that they come from.
        min_pictures: so many at least.
        num_answered: labelled things that the served model was asked about since the newest report, the newest 500.
        num_right: how many of these it answered rightly.
    """

    num_samples: int
    min_samples: int
    num_pictures: int
    min_pictures: int
    num_answered: int = 0
    num_right: int = 0

    @property
    def is_enough(self) -> bool:
        """Whether a round can begin."""
        return self.num_samples >= self.min_samples and self.num_pictures >= self.min_pictures


@runtime_checkable
class CountsLabels(Protocol):
    """A source that knows how many labels are missing until the next round."""

    def progress(self) -> LabelProgress:
        """What waits; may be called on any thread."""


@dataclass(frozen=True, slots=True)
class PictureSource:
    """What gives pictures; nothing ever comes back to it.

    Attributes:
        cameras: their names differ.
        view: how the fleet's task looks at their pictures.
        description: one line for logs.
    """

    cameras: tuple[Camera, ...]
    view: View
    description: str


class SampleSource(Protocol):
    """What takes answers, and gives labelled samples to learn from."""

    def watch(self, shown: Shown) -> None:
        """Take note of a picture that was served; called on the serving thread, so it must be quick."""

    def round_samples(self, round_index: int) -> Samples | None:
        """Samples that this round, and only this round, may learn from; None if there are none (yet).

        Asked again for the same round it answers with the same samples; after a crash only sources that keep samples
        outside of this process can.
        """

    def used_up(self, round_index: int) -> None:
        """No later round is to get this one's samples: they were learned from, or never will be.

        Those of a round that passed without it may come again.
        """

    def test_samples(self, round_index: int) -> Samples | None:
        """Held-out samples of all classes met up to and including ``round_index``; None if the source has none."""

    def measures(self) -> Mapping[str, float]:
        """What was measured since the last call, for the next report: metric -> value."""


@dataclass(frozen=True, slots=True)
class Source:
    """What an operator's ``--source`` means: one half is served, the other is learned from."""

    pictures: PictureSource
    samples: SampleSource
