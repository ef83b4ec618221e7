"""What an operator can ask ``edge-client bench``; imports nothing heavy, for ``--help`` is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.settings import Option, check_settings

MODEL = "Model"
MEASURING = "Measuring"

DEFAULT_SOURCE = "synthetic://street?rate=30"
"""At the pace of a camera: a machine that keeps up answers all of it, and says how much more it could."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What ``edge-client bench`` was asked; without ``model`` and ``data_dir`` it takes the model that comes along."""

    model: Path | None = None
    parameters: Annotated[
        Path | None, Option("Parameters of a MODEL that was exported with --split.", MODEL, metavar="FILE")
    ] = None
    data_dir: Annotated[
        Path | None, Option("Measure what the client with this data dir serves.", MODEL, metavar="DIR")
    ] = None
    batches: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=4096)], ...],
        Option("Batch size to measure with, 1 to 4096.", MEASURING, unset="1 and 64", metavar="N", flags="--batch"),
    ] = (1, 64)
    threads: Annotated[int, Meta(ge=1, le=256), Option("Threads of one inference.", MEASURING)] = 1
    seconds: Annotated[float, Meta(gt=0, le=3600), Option("How long each number is measured.", MEASURING, unit="s")] = (
        2.0
    )
    source: Annotated[
        str, Option("Camera whose pictures are served meanwhile.", MEASURING, metavar="URI", unset=DEFAULT_SOURCE)
    ] = ""
    frames: Annotated[bool, Option("Serve pictures, and measure how many a second.", MEASURING)] = True

    def __post_init__(self) -> None:
        check_settings(self)
        if self.model is not None and self.data_dir is not None:
            raise SettingsError("both MODEL and --data-dir are given; expected one of them")
        if self.parameters is not None and self.model is None:
            raise SettingsError("--parameters belongs to MODEL, which isn't given")
        if self.source and not self.frames:
            raise SettingsError("both --source and --no-frames are given; expected one of them")
