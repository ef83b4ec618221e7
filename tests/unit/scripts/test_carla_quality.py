"""The models are doubled here, as functions; ``tests/e2e/test_demo_carla.py`` measures served ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.driving_folder import write_driving

from replayfleet.edge_client.state_store import HeldDownload
from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.service.fleet.spec import make_spec
from replayfleet.federation.streams.datasets import task_for
from replayfleet.federation.wire.protocol.messages import BlobEntry, Manifest, Probe, Serving
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec
from replayfleet.scripts.carla import quality
from replayfleet.scripts.carla.quality import EVERYWHERE, measure, read_quality
from replayfleet.scripts.carla.roads import Roads, thin

FRAMES = {"Town01": [[0, 1]] * 8, "Town02": [[0]] * 8}
DIGESTS = {"vehicle-1": "a" * 64, "vehicle-2": "a" * 64, "vehicle-3": "b" * 64}


@pytest.fixture
def roads(tmp_path: Path) -> Roads:
    return thin(write_driving(tmp_path / "carla", FRAMES), tmp_path / "roads", num_towns=2, frames_per_town=8)


def serve(monkeypatch: pytest.MonkeyPatch, task: AnyTaskSpec) -> list[str]:
    """Let every vehicle hold a model that answers class 0; returns the vehicles whose model is loaded."""
    spec = make_spec("fleet", "fedavg", task, preset="paper", overrides={}, run_seed=0)
    loaded: list[str] = []

    def held(data_dir: Path) -> HeldDownload:
        entries = (BlobEntry("graph", "c" * 64, 1), BlobEntry("task", DIGESTS[data_dir.name], 1))
        serving = Serving("graph", "task", Probe(0, 1, (0.0,), 1.0))
        manifest = Manifest("down", "fleet", data_dir.name, 1, 1, entries, b"", serving)
        return HeldDownload(manifest, spec)

    def model(held: HeldDownload, data_dir: Path) -> Any:
        loaded.append(data_dir.name)

        def run(images: NDArray[np.float32]) -> NDArray[np.float32]:
            outputs = np.zeros((len(images), *task.output_shape), np.float32)
            outputs[:, 0] = -9.0 if isinstance(task, DetectionSpec) else 9.0
            return outputs

        return run

    monkeypatch.setattr(quality, "_held", held)
    monkeypatch.setattr(quality, "_model", model)
    return loaded


def test_objects_of_all_towns_count_and_equal_models_are_measured_once(
    roads: Roads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded = serve(monkeypatch, task_for("carla-crops"))
    found = measure(tmp_path, tuple(DIGESTS), roads)
    assert loaded == ["vehicle-1", "vehicle-3"]
    for by_town in found.values():
        assert [(by_town[town].num_objects, by_town[town].accuracy) for town in (*roads.towns, EVERYWHERE)] == [
            (4, 0.5),
            (2, 1.0),
            (6, pytest.approx(4 / 6)),
        ]
    assert read_quality(tmp_path) == found


def test_of_a_detector_boxes_are_counted_and_map_is_measured(
    roads: Roads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    anchors = ((0.05, 0.2), (0.1, 0.3))
    serve(monkeypatch, DetectionSpec(3, 32, 64, roads.class_names, anchors, 1, 16))
    found = measure(tmp_path, ("vehicle-1",), roads)["vehicle-1"]
    assert {town: one.num_objects for town, one in found.items()} == {"Town01": 4, "Town02": 2, EVERYWHERE: 6}
    assert all(one.boxes_found == 0.0 and one.accuracy is None for one in found.values())
    assert all(one.map50 is not None and 0 <= one.map50 < 0.1 for one in found.values())


def test_a_vehicle_without_a_model_is_an_error(roads: Roads, tmp_path: Path):
    with pytest.raises(ReplayfleetError, match="vehicle-1 holds no model; run the demo first"):
        measure(tmp_path, ("vehicle-1",), roads)


def test_a_damaged_file_is_an_error(tmp_path: Path):
    (tmp_path / "quality.json").write_text(json.dumps({"vehicle-1": {"Town01": {"accuracy": 1.0}}}))
    with pytest.raises(ReplayfleetError, match="can't be read"):
        read_quality(tmp_path)
