"""What an operator says about a frame, and who takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

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

TakeBack: TypeAlias = Callable[[], bool]
"""Forgets what was learned from one word; False if a round has it already. May be called on any thread."""


@runtime_checkable
class TakesFeedback(Protocol):
    """A source whose frames an operator can label."""

    def feedback(self, feedback: AnyFeedback) -> TakeBack:
        """Learn from it; raises FeedbackRefused. Returns how to take it back."""


class Desk(Protocol):
    """Where an operator's word meets a frame; safe across threads."""

    def keep(self, shown: Shown) -> None:
        """Keep a frame for a while."""

    def samples(self, feedback: AnyFeedback) -> tuple[Samples, str]:
        """Return what is to be learned, and the frame's place; raises FeedbackRefused."""
