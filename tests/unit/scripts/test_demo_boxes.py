from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from replayfleet.scripts.carla.plan import FAST
from replayfleet.scripts.experiments import demo_boxes
from tests.support.driving_folder import write_driving

SMALL = dataclasses.replace(
    FAST, num_towns=2, frames_per_town=8, works=(dataclasses.replace(FAST.works[1], detector=(64, 32, 1)),)
)


def test_the_demos_rounds_without_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [[index % 5] for index in range(8)]
    write_driving(tmp_path / "data" / "carla", {"Town01": frames, "Town02": frames}, side=20.0)
    monkeypatch.setattr(demo_boxes, "FULL", SMALL)
    settings = ["--set", "local_epochs=2", "--seed", "3"]
    for name in ("a", "b"):
        call = ["--data-root", str(tmp_path / "data"), "--out", str(tmp_path / name), *settings]
        demo_boxes.demo_boxes.main(call, standalone_mode=False)
    found, again = (json.loads((tmp_path / name).read_text()) for name in ("a", "b"))
    assert len(found["boxes_found"]) == SMALL.num_rounds
    assert all(0 <= share <= 100 for each in found["boxes_found"] for share in each.values())
    assert (found["settings"]["local_epochs"], found["seed"]) == ("2", 3)
    assert (found["boxes_found"], found["map50"]) == (again["boxes_found"], again["map50"])
