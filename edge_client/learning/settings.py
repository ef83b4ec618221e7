"""What an operator says about learning from cameras' pictures. Imports nothing heavy: ``--help`` is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.settings import CAMERA, Option, check_settings

LEARNING = "Learning from cameras"
MAX_ROUND_SAMPLES = 20_000
"""Of a round, whatever its source gives; 28x28x1 float32 at this count is 63 MB."""


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """What becomes of cameras' pictures beside being served."""

    view: Annotated[
        Literal["auto", "whole", "crops"],
        Option(
            "What of a picture is classified: the whole, or the objects in it; auto takes these where a camera brings "
            "boxes.",
            CAMERA,
        ),
    ] = "auto"
    only_classes: Annotated[
        str,
        Option(
            "What can be seen here, where that is known: answers are among these classes alone, a,b,c. Training "
            "learns all of them.",
            CAMERA,
            metavar="NAMES",
            unset="all of the fleet's",
        ),
    ] = ""
    teacher: Annotated[Path | None, Option("ONNX model that labels what nobody else does.", LEARNING)] = None
    teacher_confidence: Annotated[
        float,
        Meta(gt=0, le=1),
        Option(
            "Softmax probability, or a detector's score, below which the teacher isn't believed. In a picture where a "
            "detector is sure of something, what it sees below is learned as background: take less if it scores low.",
            LEARNING,
            needs="teacher",
        ),
    ] = 0.9
    keep_frames_s: Annotated[
        float, Meta(gt=0, le=3600), Option("How long an operator can label a frame after it came.", LEARNING, unit="s")
    ] = 60.0
    min_samples: Annotated[
        int, Meta(ge=2, le=MAX_ROUND_SAMPLES), Option("Labelled samples that a round needs to begin.", LEARNING)
    ] = 50
    min_pictures: Annotated[
        int,
        Meta(ge=1),
        Option(
            # Where pictures show some one thing and others ten, this is what makes rounds of one stream equally long.
            "Pictures that these samples must come from, all cameras together.",
            LEARNING,
        ),
    ] = 1
    max_samples: Annotated[
        int,
        Meta(ge=2, le=MAX_ROUND_SAMPLES),
        Option(
            "Labelled samples that a round takes at most. The newest stay; others are dropped and counted.", LEARNING
        ),
    ] = 2000
    hold_out: Annotated[
        int,
        Meta(ge=0),
        Option(
            "Of every so many labelled pictures of a camera one is kept in memory for testing; at least 2.",
            LEARNING,
            unset="0, for none",
        ),
    ] = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.min_samples > self.max_samples:
            raise SettingsError(f"min_samples is {self.min_samples}, expected at most max_samples, {self.max_samples}")
        if self.hold_out == 1:
            raise SettingsError("hold_out is 1, expected 0 (never) or at least 2")
