from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.driving_folder import CLASS_NAMES, write_driving

from replayfleet.aggregator.settings import AggregatorSettings
from replayfleet.edge_client.cameras.recorded.carla_replay import CarlaReplayCamera, CarlaReplaySettings
from replayfleet.edge_client.cameras.recorded.synthetic import SyntheticCamera, SyntheticSettings
from replayfleet.edge_client.cameras.uri import CameraUri, parse_source
from replayfleet.edge_client.settings import ClientSettings
from replayfleet.edge_client.sync.session_logic import Step
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.settings import split_overrides
from replayfleet.federation.streams.files.picture_files import read_picture
from replayfleet.models.specs import DetectionSpec
from replayfleet.scripts.carla.__main__ import found_recording
from replayfleet.scripts.carla.drive import STRANDED_S, places, stranding
from replayfleet.scripts.carla.plan import FAST, FULL, VEHICLES, Plan, Size
from replayfleet.scripts.carla.roads import HOLD_OUT, STREET_TOWNS, Roads, StreetRoads, find_recording, thin

BROKER = "mqtt://127.0.0.1:1"
FRAMES = {
    "Town01": [[0], [], [1, 2]] * 5,
    "Town02": [[3, 0]] * 9,
    "Town03": [[4]] * 12,
    "Town04": [[0]] * 3,
}


@pytest.fixture
def recorded(tmp_path: Path) -> Roads:
    return thin(write_driving(tmp_path / "carla", FRAMES), tmp_path / "roads", num_towns=3, frames_per_town=10)


def plan(roads: Roads, out: Path, size: Size = FAST, **changes: Any) -> Plan:
    return Plan(out=out, size=size, roads=roads, **changes)


def value(command: Sequence[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_thinned_towns_have_equally_many_frames_that_all_show_something(recorded: Roads):
    assert recorded.towns == ("Town01", "Town02", "Town03")  # the smallest stays out
    for town in recorded.towns:
        camera = _camera(recorded, town)
        assert len(camera.files) == 8
        assert all(len(camera.boxes(index, (240, 48)) or ()) for index in range(8))


def test_held_out_frames_are_those_that_every_vehicle_holds_out(recorded: Roads):
    for town in recorded.towns:
        camera = _camera(recorded, town)
        scenes = list(recorded.held_out(town))
        assert len(scenes) == 8 // HOLD_OUT
        kept = [index for index in range(8) if (index + 1) % HOLD_OUT == 0]
        for index, scene in zip(kept, scenes, strict=True):
            found = camera.boxes(index, (240, 48))
            assert np.array_equal(found.corners, scene.boxes.corners)
            assert np.array_equal(read_picture(camera.files[index]), scene.pixels)


def test_anchors_are_fitted_to_boxes_that_are_not_held_out(tmp_path: Path):
    towns = {"Town01": [[0]] * 3 + [[1, 2, 3]], "Town02": [[0, 1]] * 3 + [[1]]}
    roads = thin(write_driving(tmp_path / "carla", towns), tmp_path / "roads", num_towns=2, frames_per_town=4)
    assert len(roads.box_sizes()) == 3 + 6


def test_too_few_towns_are_refused(tmp_path: Path):
    root = write_driving(tmp_path / "carla", {"Town01": [[0]] * 4, "Town02": [[0]] * 2})
    with pytest.raises(SettingsError, match="the smallest with 2 frames that show something; expected 2 with 4"):
        thin(root, tmp_path / "roads", num_towns=2, frames_per_town=10)


def test_every_vehicle_drives_through_every_town_once_and_begins_elsewhere(recorded: Roads, tmp_path: Path):
    found = plan(recorded, tmp_path)
    for work in found.size.works:
        ways = [found.drive(work, index).towns for index in range(len(VEHICLES))]
        assert ways == [("Town01", "Town02", "Town03"), ("Town03", "Town01", "Town02")]
        for index in range(len(VEHICLES)):
            uri = parse_source(recorded.source(found.drive(work, index)))
            assert isinstance(uri, CameraUri)
            assert isinstance(uri.settings, CarlaReplaySettings)
            assert not uri.settings.loop
            assert uri.settings.order == ways[index]
            assert recorded.num_pictures(found.drive(work, index)) == 24


@pytest.mark.parametrize("size", [FULL, FAST], ids=["full", "fast"])
def test_rounds_wait_for_their_share_of_a_town_and_no_more_than_there_is(size: Size, tmp_path: Path):
    found = plan(StreetRoads(STREET_TOWNS[: size.num_towns], size.frames_per_town), tmp_path, size)
    for work in size.works:
        pictures = found.min_pictures(found.drive(work, 0))
        share = size.frames_per_town / size.rounds_per_town * (HOLD_OUT - 1) / HOLD_OUT
        assert 0.7 * share < pictures <= share
        assert size.num_rounds * pictures <= size.num_towns * size.frames_per_town
    assert size.frames_per_town % HOLD_OUT == 0


def test_the_full_demo_drives_for_less_than_its_twenty_minutes(tmp_path: Path):
    found = plan(StreetRoads(STREET_TOWNS, FULL.frames_per_town), tmp_path, FULL)
    seconds = sum(found.drive_s(work) for work in FULL.works)
    assert 600 < seconds < 16 * 60
    slower = plan(found.roads, tmp_path, FULL, slower=2.0)
    assert sum(slower.drive_s(work) for work in FULL.works) == pytest.approx(2 * seconds)


def test_drawn_towns_follow_one_another_and_the_held_out_street_is_another(tmp_path: Path):
    roads = StreetRoads(("sunny", "rain"), 8)
    found = plan(roads, tmp_path)
    drive = found.drive(FAST.works[0], 1)
    uri = parse_source(roads.source(drive))
    assert isinstance(uri, CameraUri)
    assert isinstance(uri.settings, SyntheticSettings)
    camera = SyntheticCamera(uri.settings, "front")
    assert [camera.town_of(number) for number in (0, 7, 8, 15)] == ["rain", "rain", "sunny", "sunny"]
    assert roads.num_pictures(drive) is None
    first = next(iter(roads.held_out("sunny"))).pixels
    assert not np.array_equal(first, next(iter(StreetRoads(("sunny",), 8)._scenes("sunny", drive.seed, 1))).pixels)


def test_command_lines_are_ones_that_the_programs_take(recorded: Roads, tmp_path: Path):
    (tmp_path / "films").mkdir()
    for size in (FULL, FAST):
        found = plan(recorded, tmp_path, dataclasses.replace(size, num_towns=3), seed=5)
        found.write_tasks()
        for work in found.size.works:
            command = found.fleet(work).aggregator
            chosen = [command[place + 1] for place, word in enumerate(command) if word == "--set"]
            task: dict[str, Any] = {"task": Path(value(command, "--task"))} if "--task" in command else {}
            task = task or {"dataset": value(command, "--dataset")}
            spec = AggregatorSettings(
                data_dir=tmp_path / "data",
                clients=2,
                rounds=int(value(command, "--rounds")),
                method=value(command, "--method"),
                settings=value(command, "--settings"),
                set=split_overrides(chosen),
                seed=int(value(command, "--seed")),
                **task,
            ).spec()
            assert (spec.run_seed, spec.fleet) == (5, "fleet")
            vehicle = found.fleet(work).clients["vehicle-2"]
            settings = ClientSettings(
                broker=BROKER,
                client_id=value(vehicle, "--client-id"),
                source=value(vehicle, "--source"),
                data_dir=Path(value(vehicle, "--data-dir")),
                min_samples=int(value(vehicle, "--min-samples")),
                min_pictures=int(value(vehicle, "--min-pictures")),
                max_samples=int(value(vehicle, "--max-samples")),
                hold_out=int(value(vehicle, "--hold-out")),
                record=Path(value(vehicle, "--record")),
            )
            assert settings.hold_out == HOLD_OUT


def test_a_detectors_task_fits_the_boxes_on_the_road(recorded: Roads, tmp_path: Path):
    work = FULL.works[1]
    spec = plan(recorded, tmp_path).detector_task(dataclasses.replace(work, detector=(320, 192, 4)))
    assert isinstance(spec, DetectionSpec)
    assert spec.class_names == CLASS_NAMES
    assert (spec.image_width, spec.image_height, spec.stride) == (320, 192, 8)
    assert spec.architecture == "pyramid"


def test_a_folder_without_towns_says_where_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REPLAYFLEET_DATA", raising=False)
    with pytest.raises(SettingsError, match=r"Carla-Object-Detection-Dataset by DanielHfnr.*--synthetic"):
        found_recording(None)
    with pytest.raises(SettingsError, match="neither it nor its carla/"):
        find_recording(tmp_path, None)
    assert find_recording(None, str(tmp_path)) is None
    write_driving(tmp_path / "carla", FRAMES)
    assert find_recording(None, str(tmp_path)) == tmp_path / "carla"


def test_a_vehicle_whose_road_is_over_and_that_waits_for_data_is_stranded(recorded: Roads, tmp_path: Path):
    found, work = plan(recorded, tmp_path), FAST.works[0]
    now = [100.0]
    is_stranded = stranding(found, work, lambda: now[0])
    assert not is_stranded()  # nobody has written anything yet
    _status(found, frames=20, dropped=4, phase=Step.WAIT_DATA.value)
    assert not is_stranded()
    now[0] += STRANDED_S / 2
    _status(found, frames=20, dropped=4, phase=Step.TRAINING.value)
    assert not is_stranded()
    now[0] += STRANDED_S
    _status(found, frames=20, dropped=4, phase=Step.WAIT_DATA.value)
    assert not is_stranded()  # it counts anew
    now[0] += STRANDED_S
    assert is_stranded()
    _status(found, frames=20, dropped=3, phase=Step.WAIT_DATA.value)
    assert not is_stranded()
    assert "vehicle-2: Town02, picture 23 of 24" in places(found, work)


def _status(found: Plan, **values: Any) -> None:
    folder = found.vehicle_dir(FAST.works[0], "vehicle-2")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps({"pid": 0, "failed": 0, **values}))


def _camera(roads: Roads, town: str) -> CarlaReplayCamera:
    uri = parse_source(roads.source(_drive(town)))
    assert isinstance(uri, CameraUri)
    assert isinstance(uri.settings, CarlaReplaySettings)
    return CarlaReplayCamera(uri.settings, "front")


def _drive(town: str) -> Any:
    from replayfleet.scripts.carla.roads import Drive

    return Drive(towns=(town,), rate_hz=10.0, seed=0)
