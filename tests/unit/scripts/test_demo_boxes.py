from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from replayfleet.scripts.carla.plan import FAST, VEHICLES
from replayfleet.scripts.carla.quality import EVERYWHERE
from replayfleet.scripts.experiments import demo_boxes
from tests.support.driving_folder import write_driving

SMALL = dataclasses.replace(
    FAST, num_towns=2, frames_per_town=8, works=(dataclasses.replace(FAST.works[1], detector=(64, 32, 1)),)
)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    frames = [[index % 5] for index in range(8)]
    write_driving(folder / "data" / "carla", {"Town01": frames, "Town02": frames}, side=20.0)
    monkeypatch.setattr(demo_boxes, "FULL", SMALL)
    call = ["--data-root", str(folder / "data"), "--out", str(folder / "out"), "--set", "local_epochs=2", "--seed", "3"]
    demo_boxes.demo_boxes.main([*call, *words], standalone_mode=False)
    return dict(json.loads((folder / "out").read_text()))


def test_the_demos_rounds_without_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, again = (run(tmp_path / name, monkeypatch) for name in ("a", "b"))
    assert len(found["boxes_found"]) == SMALL.num_rounds
    assert all(each.keys() == {*VEHICLES, EVERYWHERE} for each in found["boxes_found"])
    assert all(0 <= share <= 100 for each in found["boxes_found"] for share in each.values())
    assert (found["settings"]["local_epochs"], found["seed"]) == ("2", 3)
    assert (found["boxes_found"], found["map50"]) == (again["boxes_found"], again["map50"])


def test_all_towns_at_once_bound_what_the_fleet_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, monkeypatch, "--at-once")
    assert found["boxes_found"].keys() == {"Town01", "Town02", EVERYWHERE}
    assert 0 <= found["boxes_found_in_training"] <= 100
    assert found["settings"]["local_epochs"] == "2"
