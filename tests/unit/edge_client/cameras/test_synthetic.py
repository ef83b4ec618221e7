from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from support.recordings import CLASS_NAMES, play

from replayfleet.edge_client.cameras.recorded.synthetic import SyntheticCamera, SyntheticSettings
from replayfleet.edge_client.flow import Camera
from replayfleet.federation.errors import SettingsError


def _camera(**settings: object) -> SyntheticCamera:
    return SyntheticCamera(SyntheticSettings(**{"width": 96, "height": 64, **settings}), "street")  # type: ignore[arg-type]


def test_the_street_is_a_live_camera_with_boxes():
    camera: Camera = SyntheticCamera(SyntheticSettings(rate=50.0, seed=1), "street")
    pictures = play(camera, most=4)
    assert camera.live
    assert camera.class_names == CLASS_NAMES
    assert {picture.size for picture in pictures} == {(640, 380)}
    assert all(picture.boxes for picture in pictures)
    assert pictures[0].frame_id == 0
    assert all(a.captured_at < b.captured_at for a, b in itertools.pairwise(pictures))


def test_equal_settings_show_the_same_drive_whatever_the_reader_missed():
    slow, quick = _camera(rate=20.0, seed=7), _camera(rate=20.0, seed=7)
    seen = {picture.frame_id: picture for picture in play(quick, most=8)}
    stop = threading.Event()
    compared = 0
    for picture in slow.pictures(stop):
        if picture.frame_id in seen:
            assert (picture.pixels == seen[picture.frame_id].pixels).all()
            compared += 1
        time.sleep(0.11)
        if picture.frame_id >= 6:
            stop.set()
    assert compared >= 1


def test_a_slow_reader_makes_ids_jump_and_nothing_queues():
    ids = []
    stop = threading.Event()
    began = time.monotonic()
    for picture in _camera(rate=100.0).pictures(stop):
        ids.append(picture.frame_id)
        assert began <= picture.captured_at <= time.monotonic()
        time.sleep(0.05)
        if len(ids) == 5:
            stop.set()
    assert np.diff(ids).min() >= 4
    assert ids[-1] <= (time.monotonic() - began) * 100


def test_iterating_anew_goes_on_in_the_same_drive():
    camera = _camera(rate=200.0)
    first = play(camera, most=3)
    assert play(camera, most=1)[0].frame_id > first[-1].frame_id


def test_several_towns_follow_one_another_round_and_round():
    camera = _camera(rate=100.0, towns="night, sunny", stay=0.05)
    assert [camera.town_of(frame_id) for frame_id in (0, 4, 5, 9, 10)] == ["night", "night", "sunny", "sunny", "night"]
    brightness: dict[str, list[float]] = {"night": [], "sunny": []}
    for picture in play(camera, most=20):
        brightness[camera.town_of(picture.frame_id)].append(picture.pixels.mean())
    if all(brightness.values()):  # a busy machine may have skipped one of them
        assert max(brightness["night"]) < min(brightness["sunny"])
    assert "night, sunny for 0.05 s each, 96x64 at 100/s, seed 0" in camera.describe()


def test_one_town_needs_no_stay():
    assert _camera(town="rain").town_of(10**6) == "rain"
    assert _camera().town_of(0) == "sunny"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.0}, "rate is 0.0"),
        ({"town": "night", "towns": "rain"}, "both town and towns"),
        ({"towns": "night,,rain"}, "expected names joined by commas"),
        ({"towns": "night,rian"}, "unknown town 'rian'; did you mean 'rain'"),
        ({"stay": 0.01}, "stay is 0.01 s, expected one picture or more"),
        ({"stay": float("nan")}, "stay is nan"),
        ({"width": 5000}, "width is 5000"),
        ({"seed": -3}, "seed is -3"),
    ],
)
def test_an_impossible_street_is_refused_before_the_start(settings: dict[str, object], message: str):
    with pytest.raises(SettingsError, match=message):
        _camera(**settings)
