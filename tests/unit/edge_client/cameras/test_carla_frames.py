"""Frames out of sensors that lag and interleave."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from replayfleet.edge_client.cameras.carla.frames import FRAMES_KEPT, FrameMatcher, Missing

NEVER = threading.Event()


def data(frame: int, sensor: str = "") -> SimpleNamespace:
    return SimpleNamespace(frame=frame, sensor=sensor)


def at_once(matcher: FrameMatcher, frame: int) -> Any:
    return matcher.take(frame, 0.0, NEVER)


@pytest.fixture
def matcher():
    return FrameMatcher(["rgb", "depth"])


def test_interleaved_sensors_are_matched_by_frame(matcher: FrameMatcher):
    rgb, depth = matcher.receiver("rgb"), matcher.receiver("depth")
    for receive, frame in ((rgb, 7), (rgb, 8), (depth, 7), (rgb, 9), (depth, 8), (depth, 9)):
        receive(data(frame, "rgb" if receive is rgb else "depth"))
    for frame in (7, 8, 9):
        taken = at_once(matcher, frame)
        assert [(item.sensor, item.frame) for item in taken] == [("rgb", frame), ("depth", frame)]


def test_a_frame_that_lags_is_waited_for(matcher: FrameMatcher):
    matcher.receiver("rgb")(data(7))
    assert at_once(matcher, 7) is Missing.LATE
    threading.Timer(0.05, matcher.receiver("depth"), [data(7)]).start()
    assert [item.frame for item in matcher.take(7, time.monotonic() + 5, NEVER)] == [7, 7]


def test_stale_frames_are_let_go(matcher: FrameMatcher):
    rgb, depth = matcher.receiver("rgb"), matcher.receiver("depth")
    for frame in (5, 6, 7):
        rgb(data(frame))
    depth(data(7))
    assert [item.frame for item in at_once(matcher, 7)] == [7, 7]
    depth(data(6))
    assert at_once(matcher, 6) is Missing.LATE
    assert matcher.waiting_for(6) == "rgb, depth"


def test_a_sensor_that_goes_on_without_a_frame_has_lost_it(matcher: FrameMatcher):
    rgb, depth = matcher.receiver("rgb"), matcher.receiver("depth")
    for frame in (7, 8, 9, 10, 11):
        rgb(data(frame))
    for frame in (8, 9, 10):
        depth(data(frame))
    assert at_once(matcher, 7) is Missing.LATE
    assert matcher.waiting_for(7) == "depth"
    depth(data(11))
    assert at_once(matcher, 7) is Missing.LOST
    assert [item.frame for item in at_once(matcher, 8)] == [8, 8]


def test_a_reader_that_stands_still_costs_bounded_memory(matcher: FrameMatcher):
    for frame in range(10 * FRAMES_KEPT):
        matcher.receiver("rgb")(data(frame))
    assert len(matcher._held["rgb"]) == FRAMES_KEPT
    assert max(matcher._held["rgb"]) == 10 * FRAMES_KEPT - 1


def test_stopping_ends_a_wait(matcher: FrameMatcher):
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    began = time.monotonic()
    assert matcher.take(7, began + 30, stop) is Missing.LATE
    assert time.monotonic() - began < 20
