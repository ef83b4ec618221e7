"""What an operator says about a frame, and who takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from replayfleet.edge_client.flow import Samples, Shown
from replayfleet.federation.errors import ReplayfleetError


class FeedbackRefused(ReplayfleetError):
    """A label that can't be used; says why."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a frame, or one object in it, shows.

    Attributes:
        camera: whose frame; empty where the client has one camera.
        frame_id: of the frame.
        class_name: what it shows.
        object_index: which object of the frame, in the order of its answers; None: the whole picture.
    """

    camera: str
    frame_id: int
    class_name: str
    object_index: int | None = None


@dataclass(frozen=True, slots=True)
class NamedBox:
    """One thing and where it is.

    Attributes:
        class_name: of the task.
        corners: left, top, right, bottom in pixels of the picture.
    """

    class_name: str
    corners: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class BoxFeedback:
    """Everything that is to be seen in a frame: what a detector should have found.

    Attributes:
        camera: whose frame; empty where the client has one camera.
        frame_id: of the frame.
        boxes: all of them; none says that there is nothing.
    """

    camera: str
    frame_id: int
    boxes: tuple[NamedBox, ...]


AnyFeedback: TypeAlias = Feedback | BoxFeedback

TakeBack: TypeAlias = Callable[[], str]
"""Forgets what was learned from one word, or returns what became of it instead. May be called on any thread."""

IN_A_ROUND = "is in a round already, and stays"
REPLACED = "isn't there any more: another word about its frame has taken its place"
DROPPED = "isn't there any more: newer samples have taken its place (max_samples)"


@runtime_checkable
class TakesFeedback(Protocol):
    """A source whose frames an operator can label."""

    def feedback(self, feedback: AnyFeedback, shown: Shown | None = None) -> TakeBack:
        """Learn from it; raises FeedbackRefused. Returns how to take it back.

        With ``shown``, the frame that it is about, it can be one that isn't kept any more.
        """


class Meant(NamedTuple):
    """What an operator's word makes of a frame.

    Attributes:
        samples: to be learned.
        place: where the frame was taken.
        about: camera, frame and object that are meant, however they were named.
    """

    samples: Samples
    place: str
    about: tuple[str, int, int | None]


class Desk(Protocol):
    """Where an operator's word meets a frame; safe across threads."""

    def keep(self, shown: Shown) -> None:
        """Keep a frame for a while."""

    def samples(self, feedback: AnyFeedback) -> Meant:
        """Return what is to be learned; raises FeedbackRefused."""
