"""A fleet that learns from cameras: drives and labels as files, clients and an aggregator over a broker in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from support.client_world import World, events

from replayfleet.edge_client.flow import Shown
from replayfleet.edge_client.learning.settings import LearningSettings
from replayfleet.edge_client.sources import source_opener
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.models.specs import TaskSpec

TASK = TaskSpec(3, 32, ("car", "bike"), generator_width=1)


def write_drive(root: Path, towns: tuple[str, ...], num_frames: int) -> Path:
    """Red cars and blue bikes on grey, in the form of recorded driving."""
    rng = np.random.default_rng(0)
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    (root / "labels.txt").write_text("bike\ncar\n")
    for town in towns:
        for number in range(num_frames):
            pixels = np.full((96, 160, 3), 128, np.uint8)
            lines = []
            for place, class_id in enumerate(rng.integers(0, 2, 3)):
                left, top = 10 + 50 * place, int(rng.integers(10, 50))
                pixels[top : top + 30, left : left + 30] = (255, 40, 40) if class_id == 0 else (40, 40, 255)  # BGR
                lines.append(f"{class_id} {(left + 15) / 160:.5f} {(top + 15) / 96:.5f} {30 / 160:.5f} {30 / 96:.5f}")
            cv2.imwrite(str(root / "images" / f"{town}_{number:06d}.jpg"), pixels)
            (root / "labels" / f"{town}_{number:06d}.txt").write_text("\n".join(lines))
    return root


def last_reports(fleet: World) -> list[dict[str, Any]]:
    return [report for report in events(fleet, "client report") if report["round"] == 2]


def drive(root: Path, tmp_path: Path, *queries: str, least: int = 20) -> Any:
    """Sources of one client: a camera per query."""
    learning = LearningSettings(min_samples=least, max_samples=max(least, 48), hold_out=4)
    return source_opener([f"carla-replay://{root}?{query}" for query in queries], tmp_path, learning=learning)


@pytest.mark.usefixtures("served_here")
def test_vehicles_make_rounds_of_the_objects_they_drive_past_and_miss_no_frame(world: Any, tmp_path: Path) -> None:
    root = write_drive(tmp_path / "drive", ("Town01", "Town02"), 8)
    fleet = world(num_clients=2, num_rounds=2, task=TASK)
    seen: dict[str, list[Shown]] = {"car-0": [], "car-1": []}
    for client_id, towns in (("car-0", "Town01,Town02"), ("car-1", "Town02,Town01")):
        opener = drive(root, tmp_path, f"towns={towns}&rate=20&loop=true")
        fleet.start_client(client_id, open_source=opener, watchers=[seen[client_id].append])
    fleet.until(lambda: len(last_reports(fleet)) == 2 and all(c.client.finished for c in fleet.clients.values()))
    for client_id, client in fleet.clients.items():
        client.stop()
        assert client.counts.num_failed == 0
        assert client.counts.num_dropped == sum(shown.prediction is None for shown in seen[client_id])
        frames = [shown.picture.frame_id for shown in seen[client_id]]
        assert frames == list(range(len(frames)))  # a recording: every frame, in order
    assert all(report["accuracy"] is not None for report in last_reports(fleet))  # on held-out objects
    places = {shown.picture.place for shown in seen["car-0"]}
    assert places == {"Town01", "Town02"}


def test_one_client_serves_two_cameras_and_an_operators_feedback_over_mqtt_is_learned(
    world: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    root = write_drive(tmp_path / "drive", ("Town01",), 10)
    fleet = world(num_clients=1, num_rounds=1, task=TASK)
    seen: list[Shown] = []
    opener = drive(root, tmp_path, "rate=50&loop=true", "rate=50&loop=true", least=5000)
    client = fleet.start_client("car-0", open_source=opener, watchers=[seen.append])
    fleet.until(lambda: len(seen) > 40)
    assert {shown.picture.camera for shown in seen} == {"camera-0", "camera-1"}
    frame = next(shown for shown in reversed(seen) if len(shown.inputs.images))
    body = {"camera": frame.picture.camera, "frame": frame.picture.frame_id, "class": "bike", "object": 0}
    operator = fleet.broker.session("operator", on_message=lambda topic, payload: None)
    operator.start()
    for payload in (b"\x00garbage", b'{"frame": -5, "class": "bike", "object": 0}', json.dumps(body).encode()):
        operator.publish(topic_of("fleet", "feedback", "car-0"), payload)
    fleet.until(lambda: "feedback taken" in caplog.messages)
    assert caplog.messages.count("feedback refused") == 2
    shared = client.share(None, bytes(32))  # an operator has a key now, and nobody else's word counts
    operator.publish(topic_of("fleet", "feedback", "car-0"), json.dumps(body).encode())
    fleet.until(lambda: caplog.messages.count("feedback refused") == 3)
    shared.close()
    assert caplog.messages.count("feedback taken") == 1
    assert client.metrics.errors._value.get() == 0
