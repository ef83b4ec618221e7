"""What the driving demo runs: its two parts, their sizes, and the command lines of all processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replayfleet.federation.streams.anchors import fit_anchors
from replayfleet.models.specs import DetectionSpec
from replayfleet.scripts.carla.roads import HOLD_OUT, Drive, Roads
from replayfleet.scripts.launch.folder import note_facts
from replayfleet.scripts.launch.plan import FleetPlan, aggregator_command, client_command, write_task

VEHICLES = ("vehicle-1", "vehicle-2")
MARKER = "demo-carla.json"
"""Says that a folder belongs to this demo, and what was run there."""

OWN = ("crops", "detection", "roads", "films", "logs", "report.html")
"""What the demo writes into its folder beside the marker."""

_ASKS_AGAIN_S = 5.0
"""A client that had too little data asks again after so long; on average half of it is lost to a round."""

_NUM_ANCHORS = 6
_STRIDE = 8  # pixels; most boxes are lights of 4 x 10
_TASK_FIELDS = (
    *("image_channels", "image_height", "image_width", "class_names", "anchors", "width", "stride", "max_boxes"),
    "architecture",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One part of the demo: a fleet of its own, with a task and a method."""

    name: str  # of its folder: ``crops`` or ``detection``
    method: str
    preset: str
    overrides: Mapping[str, object]  # settings on top of the preset
    rate_hz: float  # pictures per second of each vehicle; with their number it says how long a round lasts
    max_samples: int = 2000  # that one round learns from at most
    detector: tuple[int, int, int] | None = None  # (width, height) in pixels and width of the network, of a detector


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is driven and learned."""

    num_towns: int  # that every vehicle drives through, once
    rounds_per_town: int
    frames_per_town: int  # pictures that a vehicle takes in one town at most, held-out ones included
    works: tuple[Work, ...]  # in this order

    @property
    def num_rounds(self) -> int:
        """Of each part."""
        return self.num_towns * self.rounds_per_town


# Rounds last a little longer than training takes on two quiet cores: 49 s for crops, 60 s for boxes.
FULL = Size(
    num_towns=4,
    rounds_per_town=2,
    frames_per_town=108,
    works=(
        Work(
            name="crops",
            method="pfedgrp",
            preset="small",
            overrides={"local_epochs": 6},
            rate_hz=1.1,
            max_samples=280,
        ),
        Work(
            name="detection",
            method="fedgp",
            preset="paper",
            overrides={
                "base": "der",
                "alpha": 0,
                "beta": 1,
                "local_epochs": 12,
                "batch_size": 4,
                "buffer_batch_size": 4,
                "buffer_size": 128,
                "learning_rate_schedule": "cosine",
                "reference_samples": 16,
                "weight_decay": 0.0005,
            },
            rate_hz=0.9,
            detector=(640, 384, 16),
        ),
    ),
)

# Everything works, little is learned.
FAST = Size(
    num_towns=3,
    rounds_per_town=1,
    frames_per_town=16,
    works=(
        Work(name="crops", method="pfedgrp", preset="tiny", overrides={}, rate_hz=2.0, max_samples=64),
        Work(
            name="detection",
            method="fedgp",
            preset="tiny",
            overrides={"base": "der", "local_epochs": 1, "batch_size": 4, "buffer_batch_size": 4},
            rate_hz=2.0,
            detector=(160, 96, 2),
        ),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A checked demo."""

    out: Path  # where everything goes
    size: Size
    roads: Roads
    seed: int = 0  # of models, training and drawn streets
    slower: float = 1.0  # by what factor vehicles drive slower than planned, for slower machines

    @property
    def logs(self) -> Path:
        return self.out / "logs"

    def vehicle_dir(self, work: Work, vehicle: str) -> Path:
        """A vehicle's data dir."""
        return self.out / work.name / vehicle

    def drive(self, work: Work, index: int) -> Drive:
        """Return a vehicle's way: the same towns, each vehicle beginning somewhere else."""
        towns = self.roads.towns
        start = -index % len(towns)
        return Drive(towns=towns[start:] + towns[:start], rate_hz=work.rate_hz / self.slower, seed=self.seed + index)

    def fleet(self, work: Work) -> FleetPlan:
        """Return one part's aggregator and vehicles."""
        settings = [word for key, value in work.overrides.items() for word in ("--set", f"{key}={value}")]
        task = ["--task", str(self._task_file(work))] if work.detector else ["--dataset", "carla-crops"]
        data_dir = self.out / work.name / "aggregator"
        aggregator = aggregator_command(
            data_dir,
            work.name,
            clients=len(VEHICLES),
            rounds=self.size.num_rounds,
            method=work.method,
            task=[*task, *settings],
            preset=work.preset,
            seed=self.seed,
        )
        clients = {name: self._vehicle(work, index) for index, name in enumerate(VEHICLES)}
        prefix = f"{work.name}-"
        return FleetPlan(logs=self.logs, data_dir=data_dir, aggregator=aggregator, clients=clients, prefix=prefix)

    def _vehicle(self, work: Work, index: int) -> list[str]:
        name, drive = VEHICLES[index], self.drive(work, index)
        film = self.out / film_name(work.name, name)
        return [
            *client_command(self.vehicle_dir(work, name), work.name, f"front={self.roads.source(drive)}"),
            "--hold-out", str(HOLD_OUT), "--min-samples", "4", "--min-pictures", str(self.min_pictures(drive)),
            "--max-samples", str(work.max_samples), "--record", str(film),
        ]  # fmt: skip

    def min_pictures(self, drive: Drive) -> int:
        """Return how many pictures a round waits for: its share of the way, less what comes before it is asked."""
        frames = self.roads.frames_per_town / self.size.rounds_per_town
        late = min(0.2 * frames, drive.rate_hz * _ASKS_AGAIN_S / 2)
        return max(1, int((frames - late) * (HOLD_OUT - 1) / HOLD_OUT))

    def drive_s(self, work: Work) -> float:
        """Return how long the vehicles drive, in seconds."""
        return len(self.roads.towns) * self.roads.frames_per_town * self.slower / work.rate_hz

    def write_tasks(self) -> None:
        """Write the detectors' task files, with anchors that fit the boxes on these roads."""
        for work in self.size.works:
            if work.detector is not None:
                spec = self.detector_task(work)
                fields = {name: getattr(spec, name) for name in _TASK_FIELDS}
                write_task(self._task_file(work), kind="detection", **fields)

    def detector_task(self, work: Work) -> DetectionSpec:
        """Return a detector's spec.

        Raises:
            ValueError: The part has no detector.
        """
        if work.detector is None:
            raise ValueError(f"part {work.name} detects nothing")
        width, height, channels = work.detector
        sizes = self.roads.box_sizes()
        anchors = fit_anchors(sizes, min(_NUM_ANCHORS, len(np.unique(sizes, axis=0))))
        names = self.roads.class_names
        return DetectionSpec(3, height, width, names, anchors, channels, _STRIDE, architecture="pyramid")

    def note(self, **facts: Any) -> None:
        """Add facts to the folder's marker."""
        own = {
            "synthetic": self.roads.synthetic,
            "roads": self.roads.describe(),
            "recording": self.roads.origin,
            "seed": self.seed,
            "slower": self.slower,
            "num_rounds": self.size.num_rounds,
            "frames_per_town": self.roads.frames_per_town,
            "towns": {
                work.name: {name: list(self.drive(work, index).towns) for index, name in enumerate(VEHICLES)}
                for work in self.size.works
            },
            "rate_hz": {work.name: work.rate_hz / self.slower for work in self.size.works},
        }
        note_facts(self.out / MARKER, {**own, **facts})

    def _task_file(self, work: Work) -> Path:
        return self.out / work.name / "task.toml"


def film_name(part: str, vehicle: str) -> str:
    """Return where in the demo's folder a vehicle's film of one part is."""
    return f"films/{part}-{vehicle}.webm"
