"""When a live camera counts as lost, when it is tried again, and what is logged: with numbers, without clocks."""

from __future__ import annotations

import random

from replayfleet.edge_client.cameras.live.device import DeviceCameraSettings
from replayfleet.edge_client.cameras.live.reconnect import (
    GRACE_S,
    LONGEST_DELAY_S,
    START_LIMIT_S,
    Reconnect,
    Story,
    Watchdog,
)
from replayfleet.edge_client.cameras.live.rtsp import RtspCameraSettings


def test_a_camera_that_hangs_while_opening_is_killed_after_its_own_timeout_and_some_grace() -> None:
    watchdog = Watchdog(open_s=3.0, read_s=2.0)
    watchdog.opening(100.0)
    assert watchdog.overdue(103.0) is None
    assert watchdog.overdue(103.0 + GRACE_S) == "it hung while opening, for 3.5 s"


def test_the_silence_that_kills_begins_anew_with_every_picture_that_is_wanted() -> None:
    watchdog = Watchdog(open_s=3.0, read_s=2.0)
    watchdog.reading(100.0)
    watchdog.reading(102.4)
    assert watchdog.overdue(104.8) is None
    assert watchdog.overdue(105.0) == "it hung, for 2.5 s"


def test_a_process_may_take_its_time_to_start_for_the_board_may_be_busy() -> None:
    watchdog = Watchdog(open_s=3.0, read_s=2.0)
    assert watchdog.overdue(1e9) is None
    watchdog.starting(0.0)
    assert watchdog.overdue(START_LIMIT_S - 1) is None
    assert "wasn't ready" in str(watchdog.overdue(START_LIMIT_S))


def test_delays_double_up_to_a_small_cap_and_are_jittered_downwards() -> None:
    reconnect = Reconnect(random.Random(0))
    delays = [reconnect.failed() for _ in range(12)]
    for delay, whole in zip(delays, [0.1, 0.2, 0.4] + 9 * [LONGEST_DELAY_S], strict=True):
        assert whole / 2 <= delay <= whole
    assert len(set(delays[3:])) > 1


def test_a_camera_that_comes_and_goes_is_not_tried_faster_and_faster() -> None:
    reconnect = Reconnect(random.Random(0))
    for turn in range(10):
        reconnect.delivered(float(turn))
        delay = reconnect.failed()
    assert delay >= LONGEST_DELAY_S / 2


def test_a_camera_that_was_steady_is_tried_at_once_again() -> None:
    reconnect = Reconnect(random.Random(0))
    for _ in range(10):
        reconnect.failed()
    reconnect.delivered(50.0)
    reconnect.delivered(55.0)
    assert reconnect.failed() <= 0.1


def test_whatever_an_attempt_hung_on_the_next_one_begins_early_enough_to_be_back_within_five_seconds() -> None:
    """The worst moment to return is right after an attempt began that will hang; 0.75 s are left to start and open."""
    for settings in (DeviceCameraSettings(), RtspCameraSettings("rtsp://host/street")):
        assert settings.open_timeout_s + GRACE_S + LONGEST_DELAY_S <= 4.25
        assert settings.read_timeout_s + GRACE_S + LONGEST_DELAY_S <= 4.25


def test_one_line_when_it_opens_one_when_it_is_lost_and_one_when_it_is_back() -> None:
    story = Story()
    told = [
        story.picture((640, 380), 0.0),
        story.picture((640, 380), 1.0),
        story.lost("unplugged", 2.0),
        story.lost("still unplugged", 3.0),
        story.lost("still unplugged", 4.0),
        story.picture((640, 380), 6.5),
        story.picture((640, 380), 7.0),
    ]
    assert [(news.event, news.fields) for news in told if news] == [
        ("camera opened", {"size": "640x380"}),
        ("camera lost", {"reason": "unplugged"}),
        ("camera back", {"size": "640x380", "after_s": 4.5}),
    ]
    assert story.num_lost == 1


def test_a_camera_that_was_never_there_is_lost_and_comes_back() -> None:
    story = Story()
    assert story.trouble == "not open yet"
    told = [story.lost("no such device", 0.0), story.lost("no permission", 1.0)]
    assert story.trouble == "lost: no permission"
    told.append(story.picture((64, 64), 2.0))
    assert [news.event for news in told if news] == ["camera lost", "camera back"]
    assert story.trouble == ""


def test_a_new_size_is_told_once_and_a_stream_that_changes_it_all_the_time_can_not_flood_the_log() -> None:
    story = Story()
    story.picture((640, 380), 0.0)
    told = [story.picture((640 + turn % 2, 380), 0.1 * turn) for turn in range(1, 250)]
    assert [news.fields for news in told if news] == [
        {"size": "641x380", "was": "640x380"},
        {"size": "641x380", "was": "640x380"},
        {"size": "641x380", "was": "640x380"},
    ]


def test_a_size_that_changed_during_an_outage_stands_in_the_line_that_ends_it_and_in_no_other() -> None:
    story = Story()
    story.picture((640, 380), 0.0)
    story.lost("its stream ended", 1.0)
    back = story.picture((320, 240), 2.0)
    assert back.fields == {"size": "320x240", "after_s": 1.0}
    assert story.picture((320, 240), 3.0) is None
