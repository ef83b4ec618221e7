r"""How well a detector can do on recorded driving when it learns from all towns at once: a bound for any fleet.

    python -m replayfleet.scripts.experiments.detector --data DIR --width 4 --stride 16 --size 320x192 \
        --epochs 60 --out runs/detector.json

DIR holds ``images/``, ``labels/`` and ``labels.txt``. Of every four frames of a town the last is held out.
Anchors are fitted to the training frames. Every tenth of the epochs a line with mAP on the held-out frames is printed;
at the end OUT has mAP by town and class.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.task_model import Optimisation, judge_with, train_task_model
from replayfleet.federation.service.atomic import write_atomic
from replayfleet.federation.simulator.measures.detection_metrics import DetectionQuality, evaluate_detector
from replayfleet.federation.streams.anchors import fit_anchors, mean_overlap
from replayfleet.federation.streams.driving.boxes import LabelledPictures, read_pictures
from replayfleet.federation.streams.driving.crops import TEST_EVERY
from replayfleet.federation.streams.driving.recording import Driving
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import NARROW_WIDTH, DetectionSpec

NUM_STRETCHES = 10
"""Parts that training is cut into, for a look at what it has learned."""


@dataclass(frozen=True, slots=True)
class Training:
    """What to train and for how long.

    Attributes:
        towns: to learn from and be tested on; all if none is named.
        size: width and height in pixels.
        width: of the network.
        stride: of the network.
        num_anchors: fitted to the training frames.
        optimisation: epochs and step sizes.
        seed: of parameters and order.
    """

    towns: tuple[str, ...]
    size: tuple[int, int]
    width: int
    stride: int
    num_anchors: int
    optimisation: Optimisation
    seed: int = 0


def learn(driving: Driving, wanted: Training) -> tuple[DetectionSpec, dict[str, DetectionQuality]]:
    """Train, and return (the detector's spec, town -> quality on its held-out frames, with ``all`` for all of them)."""
    towns = wanted.towns or driving.towns
    spec = _spec(driving, towns, wanted)
    train = _joined([_part(driving, town, spec, held_out=False) for town in towns])
    tests = {town: _part(driving, town, spec, held_out=True) for town in towns}
    rng = torch.Generator().manual_seed(wanted.seed)
    parameters: Parameters = initialise(build_task_model(spec), rng).state_dict()
    images, labels = torch.from_numpy(train.images()), torch.from_numpy(train.labels)
    everywhere = _joined(list(tests.values()))
    for stretch in range(NUM_STRETCHES):
        schedule = _stretch(wanted.optimisation, stretch)
        if schedule.num_epochs:
            parameters = train_task_model(spec, parameters, images, labels, schedule, rng)
            quality = _quality(spec, parameters, everywhere)
            print(f"part {stretch + 1} of {NUM_STRETCHES}: mAP@0.5 {quality.map50:.3f}, mAP {quality.map:.3f}")
    by_town = {town: _quality(spec, parameters, part) for town, part in tests.items()}
    return spec, by_town | {"all": _quality(spec, parameters, everywhere)}


def as_json(spec: DetectionSpec, qualities: Mapping[str, DetectionQuality]) -> bytes:
    """Return what ``learn`` found, for people and programs."""
    names = spec.class_names
    values = {
        "task": msgspec.to_builtins(spec),
        "quality": {
            place: {
                "map50": quality.map50,
                "map": quality.map,
                "ap50": {names[class_id]: value for class_id, value in quality.class_ap50.items()},
            }
            for place, quality in qualities.items()
        },
    }
    return msgspec.json.format(msgspec.json.encode(values), indent=2) + b"\n"


def _spec(driving: Driving, towns: Sequence[str], wanted: Training) -> DetectionSpec:
    unit = (1_000_000, 1_000_000)  # label files have shares; anchors are shares too
    frames = [frame for town in towns for index, frame in enumerate(driving.frames([town])) if not _held_out(index)]
    corners = np.concatenate([driving.annotation(frame, unit).corners for frame in frames])
    sizes = (corners[:, 2:] - corners[:, :2]) / unit
    anchors = fit_anchors(sizes, wanted.num_anchors)
    print(f"{len(frames)} frames, {len(sizes)} boxes, mean overlap with {len(anchors)} anchors", end=" ")
    print(f"{mean_overlap(sizes, anchors):.3f}: {anchors}")
    width, height = wanted.size
    return DetectionSpec(3, height, width, driving.class_names, anchors, wanted.width, wanted.stride)


def _part(driving: Driving, town: str, spec: DetectionSpec, *, held_out: bool) -> LabelledPictures:
    frames = [frame for index, frame in enumerate(driving.frames([town])) if _held_out(index) == held_out]
    return read_pictures(driving, frames, spec)


def _held_out(index: int) -> bool:
    return index % TEST_EVERY == TEST_EVERY - 1


def _joined(parts: Sequence[LabelledPictures]) -> LabelledPictures:
    return LabelledPictures(np.concatenate([p.pixels for p in parts]), np.concatenate([p.labels for p in parts]))


def _stretch(whole: Optimisation, stretch: int) -> Optimisation:
    """Return the schedule of one part of training; the last three tenths go at a tenth of the step size."""
    first, last = (whole.num_epochs * place // NUM_STRETCHES for place in (stretch, stretch + 1))
    share = 0.1 if stretch >= NUM_STRETCHES - 3 else 1.0
    return Optimisation(
        num_epochs=last - first,
        batch_size=whole.batch_size,
        learning_rate=share * whole.learning_rate,
        momentum=whole.momentum,
        weight_decay=whole.weight_decay,
    )


def _quality(spec: DetectionSpec, parameters: Parameters, part: LabelledPictures) -> DetectionQuality:
    images, labels = torch.from_numpy(part.images()), torch.from_numpy(part.labels)
    return evaluate_detector(spec, judge_with(spec, parameters), images, labels)


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of recorded driving")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--towns", default="", help="a,b,c; all if not given")
    parser.add_argument("--size", type=_size, default=(320, 192), help="WIDTHxHEIGHT in pixels")
    parser.add_argument("--width", type=int, default=NARROW_WIDTH, help="16 is the published network")
    parser.add_argument("--stride", type=int, default=16, help="8, 16 or 32")
    parser.add_argument("--anchors", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--weight-decay", type=float, default=0.0005)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    given: Any = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    optimisation = Optimisation(
        num_epochs=given.epochs,
        batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        momentum=0.9,
        weight_decay=given.weight_decay,
    )
    towns = tuple(town for town in given.towns.split(",") if town)
    wanted = Training(towns, given.size, given.width, given.stride, given.anchors, optimisation, given.seed)
    spec, qualities = learn(Driving(given.data), wanted)
    write_atomic(given.out, as_json(spec, qualities))
    print(f"written to {given.out}; mAP@0.5 {qualities['all'].map50:.3f} on all held-out frames")


if __name__ == "__main__":
    main()
