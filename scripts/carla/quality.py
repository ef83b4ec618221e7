"""How good the models are that the vehicles serve at the end, on pictures that no vehicle learned from.

The very ONNX models are taken from the vehicles' data dirs, and asked through the views that the vehicles ask through.
Axes: B inputs, C channels, H height, W width.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Picture, Samples
from replayfleet.edge_client.frames.views import Crops, Detector
from replayfleet.edge_client.learning.quality import boxes_found
from replayfleet.edge_client.serving.loading import load_model
from replayfleet.edge_client.serving.model import Workers
from replayfleet.edge_client.serving.slot import Model
from replayfleet.edge_client.state_store import HeldDownload, StateStore
from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.service.fleet.task import task_of
from replayfleet.federation.streams.box_labels import box_labels
from replayfleet.federation.wire.protocol.messages import FleetSpec
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec, TaskSpec
from replayfleet.scripts.carla.roads import Roads

QUALITY_FILE = "quality.json"
EVERYWHERE = "all towns"
_BLOBS = "blobs"
_BATCH = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """One served model on the held-out pictures of one town, or of all."""

    num_objects: int  # in these pictures
    accuracy: float | None = None  # share of objects classified rightly; None of a detector
    boxes_found: float | None = None  # share of boxes that a detector finds; None otherwise
    map50: float | None = None  # mAP@0.5 of a detector; None otherwise, or where torchmetrics isn't installed


Qualities = Mapping[str, Mapping[str, Quality]]
"""Vehicle -> town or ``EVERYWHERE`` -> quality."""


def measure(folder: Path, vehicles: tuple[str, ...], roads: Roads) -> Qualities:
    """Measure what the vehicles of one part serve, and write it to ``quality.json`` in the part's folder.

    Args:
        folder: of the part; the vehicles' data dirs are in it.
        vehicles: their names.
        roads: whose held-out pictures are taken.

    Raises:
        ReplayfleetError: A vehicle serves nothing.
    """
    found: dict[str, Mapping[str, Quality]] = {}
    known: dict[str, Mapping[str, Quality]] = {}
    tests: dict[str, Samples] = {}
    for vehicle in vehicles:
        held = _held(folder / vehicle)
        if not tests:
            tests = {town: test_samples(roads, town, held.spec) for town in roads.towns}
            tests[EVERYWHERE] = Samples(
                np.concatenate([samples.images for samples in tests.values()]),
                np.concatenate([samples.labels for samples in tests.values()]),
            )
        serving = held.manifest.serving
        assert serving is not None
        digest = next(entry.digest for entry in held.manifest.blobs if entry.name == serving.graph)
        if serving.precision == "fp32":  # else the graph holds the parameters
            digest = next(entry.digest for entry in held.manifest.blobs if entry.name == serving.parameters)
        if digest not in known:
            model, task = _model(held, folder / vehicle), task_of(held.spec)
            known[digest] = {place: _measured(model, task, samples) for place, samples in tests.items()}
        found[vehicle] = known[digest]
    values = {
        vehicle: {town: dataclasses.asdict(quality) for town, quality in by_town.items()}
        for vehicle, by_town in found.items()
    }
    write_atomic(folder / QUALITY_FILE, json.dumps(values, indent=1).encode() + b"\n")
    return found


def read_quality(folder: Path) -> Qualities:
    """Return what ``measure`` wrote.

    Raises:
        ReplayfleetError: It is missing or damaged.
    """
    path = folder / QUALITY_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {
            vehicle: {town: Quality(**quality) for town, quality in by_town.items()}
            for vehicle, by_town in values.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ReplayfleetError(f"{path} can't be read: {error}") from error


def test_samples(roads: Roads, town: str, spec: FleetSpec) -> Samples:
    """Return a town's held-out pictures as the fleet's task sees them."""
    task = task_of(spec)
    if isinstance(task, DetectionSpec):
        return _pictures(roads, town, task)
    return _crops(roads, town, task)


def _crops(roads: Roads, town: str, task: TaskSpec) -> Samples:
    view = Crops(task)
    images, labels = [np.empty((0, *task.image_shape), np.float32)], [np.empty(0, np.int64)]
    for index, scene in enumerate(roads.held_out(town)):
        inputs = view.inputs(Picture("front", index, scene.pixels, 0.0, scene.boxes, town))
        if inputs.box_indices is not None:
            images.append(inputs.images)
            labels.append(scene.boxes.class_ids[inputs.box_indices])
    return Samples(np.concatenate(images), np.concatenate(labels))


def _pictures(roads: Roads, town: str, task: DetectionSpec) -> Samples:
    view = Detector(task)
    images, labels = [], []
    for index, scene in enumerate(roads.held_out(town)):
        picture = Picture("front", index, scene.pixels, 0.0, scene.boxes, town)
        images.append(view.inputs(picture).images)
        labels.append(box_labels(scene.boxes.corners, scene.boxes.class_ids, picture.size, task.max_boxes))
    return Samples(np.concatenate(images), np.stack(labels))


def _measured(model: Model, task: AnyTaskSpec, samples: Samples) -> Quality:
    outputs = _in_batches(model, samples)
    if isinstance(task, TaskSpec):
        hits = outputs.argmax(axis=1) == samples.labels
        return Quality(len(hits), accuracy=float(hits.mean()) if len(hits) else None)
    return Quality(
        num_objects=int((samples.labels[:, :, 0] >= 0).sum()),
        boxes_found=boxes_found(model, samples, task),
        map50=_map50(task, outputs, samples),
    )


def _map50(task: DetectionSpec, outputs: NDArray[np.float32], samples: Samples) -> float | None:
    import torch

    from replayfleet.federation.simulator.measures.detection_metrics import evaluate_detector

    images, labels = torch.from_numpy(samples.images), torch.from_numpy(samples.labels)
    try:
        found = evaluate_detector(task, lambda _: torch.from_numpy(outputs), images, labels).map50
    except SettingsError:
        return None
    return found if np.isfinite(found) else None


def _in_batches(model: Model, samples: Samples) -> NDArray[np.float32]:
    parts = [model(samples.images[first : first + _BATCH]) for first in range(0, len(samples), _BATCH)]
    return np.concatenate(parts) if parts else np.empty((0, 1), np.float32)


def _held(data_dir: Path) -> HeldDownload:
    held = StateStore(data_dir).held() if data_dir.is_dir() else None
    if held is None:
        raise ReplayfleetError(f"{data_dir} holds no model; run the demo first")
    return held


def _model(held: HeldDownload, data_dir: Path) -> Model:
    serving, digests = held.manifest.serving, {entry.name: entry.digest for entry in held.manifest.blobs}
    assert serving is not None
    workers = Workers(data_dir / _BLOBS, num_threads=1, providers=("CPUExecutionProvider",))
    served = workers.model(digests[serving.graph], digests[serving.parameters], task_of(held.spec).image_shape)
    return load_model(served.job).run
