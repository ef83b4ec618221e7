"""What the serving loop tells others about a picture."""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.cameras.base import Picture
from edge_client.views.base import Answers, Inputs


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
        """Seconds from capture to answer."""
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
