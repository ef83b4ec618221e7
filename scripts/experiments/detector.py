r"""How well a detector can do on recorded driving when it learns from all towns at once: a bound for any fleet.

    python -m replayfleet.scripts.experiments.detector --data DIR --width 4 --stride 16 --size 320x192 \
        --epochs 60 --out runs/detector.json

DIR holds ``images/``, ``labels/`` and ``labels.txt``. Of every four frames of a town the last is held out.
Anchors are fitted to the training frames. Every tenth of the epochs a line with mAP on the held-out frames is printed;
at the end OUT has mAP by town and class.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import numpy as np
import torch

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.task_model import Optimisation, judge_with, train_task_model
from replayfleet.federation.paths import ANY_PATH, NEW_FILE
from replayfleet.federation.service.command import run_command
from replayfleet.federation.simulator.measures.detection_evaluation import evaluate_boxes
from replayfleet.federation.simulator.measures.detection_metrics import DetectionQuality
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.streams.anchors import mean_overlap
from replayfleet.federation.streams.driving.pictures import DrivingPictures, read_driving_pictures
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import NARROW_WIDTH, DetectionSpec

NUM_STRETCHES = 10
"""Parts that training is cut into, for a look at what it has learned."""


def learn(
    train: DrivingPictures, test: DrivingPictures, spec: DetectionSpec, whole: Optimisation, seed: int
) -> dict[str, DetectionQuality]:
    """Train, and return town -> quality on its held-out frames, with ``all`` for all of them."""
    rng = torch.Generator().manual_seed(seed)
    parameters: Parameters = initialise(build_task_model(spec), rng).state_dict()
    data = round_data(train, np.arange(len(train.labels)))

    def quality(place: int | None = None) -> DetectionQuality:
        chosen = np.flatnonzero((test.place_ids == place) | (place is None))
        return evaluate_boxes(spec, judge_with(spec, parameters), test, chosen).quality

    for stretch in range(NUM_STRETCHES):
        first, last = (whole.num_epochs * place // NUM_STRETCHES for place in (stretch, stretch + 1))
        share = 0.1 if stretch >= NUM_STRETCHES - 3 else 1.0  # the last three tenths take a tenth of the step
        schedule = dataclasses.replace(whole, num_epochs=last - first, learning_rate=share * whole.learning_rate)
        if schedule.num_epochs:
            parameters = train_task_model(spec, parameters, data.images, data.labels, schedule, rng)
            found = quality()
            print(f"part {stretch + 1} of {NUM_STRETCHES}: mAP@0.5 {found.map50:.3f}, mAP {found.map:.3f}")
    places = np.unique(test.place_ids).tolist()
    return {test.place_names[place]: quality(place) for place in places} | {"all": quality()}


def as_json(spec: DetectionSpec, qualities: dict[str, DetectionQuality]) -> bytes:
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


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--data", type=ANY_PATH, required=True, help="Folder of recorded driving.")
@click.option("--out", type=NEW_FILE, required=True, help="JSON file to write.")
@click.option("--towns", default="", help="a,b,c; all if not given.")
@click.option("--size", default="320x192", help="WIDTHxHEIGHT in pixels.")
@click.option("--width", type=click.IntRange(1), default=NARROW_WIDTH, help="16 is the published network.")
@click.option("--stride", type=int, default=16, help="8, 16 or 32.")
@click.option("--anchors", type=click.IntRange(1), default=6, help="Typical boxes.")
@click.option("--epochs", type=click.IntRange(1), default=60, help="Of training.")
@click.option("--batch-size", type=click.IntRange(1), default=16, help="Pictures of one step.")
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=0.01, help="Of SGD.")
@click.option("--weight-decay", type=click.FloatRange(0), default=0.0005, help="Of SGD.")
@click.option("--threads", type=click.IntRange(1, 1024), default=1, help="Of PyTorch.")
@click.option("--seed", type=int, default=0, help="Of everything.")
def detector(**options: Any) -> None:
    """Train a detector on all towns at once, and measure it on frames that were held out."""
    given = SimpleNamespace(**options)
    torch.set_num_threads(given.threads)
    width, _, height = given.size.partition("x")
    try:
        found = read_driving_pictures(
            given.data,
            towns=[town for town in given.towns.split(",") if town],
            size=(int(width), int(height)),
            width=given.width,
            stride=given.stride,
            num_anchors=given.anchors,
        )
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if found is None:
        raise SettingsError(f"{given.data} holds no recorded driving: images/, labels/ and labels.txt")
    train, test, spec = found
    boxes = train.labels[train.labels[:, :, 0] >= 0]
    print(f"{len(train.labels)} frames, {len(boxes)} boxes, mean overlap with {len(spec.anchors)} anchors", end=" ")
    print(f"{mean_overlap(boxes[:, 3:], spec.anchors):.3f}: {spec.anchors}")
    schedule = Optimisation(
        num_epochs=given.epochs,
        batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        momentum=0.9,
        weight_decay=given.weight_decay,
    )
    qualities = learn(train, test, spec, schedule, given.seed)
    write_atomic(given.out, as_json(spec, qualities))
    print(f"written to {given.out}; mAP@0.5 {qualities['all'].map50:.3f} on all held-out frames")


if __name__ == "__main__":
    run_command(detector, "detector")
