"""The loop around ``cv2.VideoCapture``. Doubles of the capture, for there is no camera; real files where they do."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from support.rtsp_server import number_in, painted

from replayfleet.edge_client.cameras.live.opencv import Capture, CaptureLoop, has_backend, open_with
from replayfleet.edge_client.flow import CameraError, Picture
from replayfleet.federation.streams.files.picture_files import MAX_SIDE

STALE = "[mjpeg @ 0x55d6c0816a00] error count: 64\n[mjpeg @ 0x55d6c0816a00] error y=0 x=4\n"
INTERLACED = "[swscaler @ 0x560a9160c740] Cannot convert interlaced to progressive frames or vice versa.\n"


class DoubledCapture:
    """Gives the sizes it was told, one a picture, then fails; every picture has its number painted in."""

    def __init__(self, sizes: list[tuple[int, int]], opens: bool = True, dtype: Any = np.uint8) -> None:
        self._sizes, self._opens, self._dtype = sizes, opens, dtype
        self._at = -1
        self.released = False
        self.num_retrieved = 0

    def isOpened(self) -> bool:  # noqa: N802
        return self._opens

    def grab(self) -> bool:
        self._at += 1
        return self._at < len(self._sizes)

    def retrieve(self) -> tuple[bool, Any]:
        self.num_retrieved += 1
        return True, painted(self._at, *self._sizes[self._at])[:, :, ::-1].astype(self._dtype)

    def get(self, prop: int) -> float:
        return float(self._sizes[self._at][0 if prop == cv2.CAP_PROP_FRAME_WIDTH else 1])

    def set(self, prop: int, value: float) -> bool:
        return True

    def release(self) -> None:
        self.released = True


def until_lost(loop: CaptureLoop) -> tuple[list[Picture], str]:
    pictures = []
    with pytest.raises(CameraError) as caught:
        pictures.extend(loop.pictures(threading.Event()))
    return pictures, str(caught.value)


def loop_over(*captures: Capture, complaints: Callable[[], str] = lambda: "", step_s: float = 1.0) -> CaptureLoop:
    queue = iter(captures)
    clock = itertools.count(0.0, step_s)
    return CaptureLoop("front", lambda: next(queue), 2.0, complaints, lambda: next(clock))


def test_every_grab_gets_the_next_number_and_the_time_at_which_it_returned() -> None:
    pictures = until_lost(loop_over(DoubledCapture(3 * [(192, 16)])))[0]
    assert [picture.frame_id for picture in pictures] == [0, 1, 2]
    times = [picture.captured_at for picture in pictures]
    assert times == sorted(set(times))
    assert {picture.camera for picture in pictures} == {"front"}


def test_pixels_are_rgb_and_follow_a_stream_that_changes_its_size() -> None:
    pictures, _ = until_lost(loop_over(DoubledCapture([(192, 32), (320, 240), (192, 32)])))
    assert [picture.size for picture in pictures] == [(192, 32), (320, 240), (192, 32)]
    assert all(picture.pixels[-1, -1].tolist() == [200, 40, 40] for picture in pictures)
    assert [number_in(picture.pixels) for picture in pictures] == [0, 1, 2]


def test_a_failed_read_ends_in_an_error_and_lets_go_of_the_device() -> None:
    capture = DoubledCapture([(192, 16)])
    _, reason = until_lost(loop_over(capture, step_s=0.01))
    assert reason == "its stream ended"
    assert capture.released


def test_a_read_that_took_as_long_as_its_timeout_is_called_a_silence() -> None:
    assert until_lost(loop_over(DoubledCapture([]), step_s=2.5))[1] == "it was silent for 2.5 s"


def test_numbers_go_on_rising_when_the_camera_is_opened_again() -> None:
    loop = loop_over(DoubledCapture(2 * [(192, 16)]), DoubledCapture(2 * [(192, 16)]))
    ids = [picture.frame_id for _ in range(2) for picture in until_lost(loop)[0]]
    assert ids == [0, 1, 2, 3]


def test_a_capture_that_does_not_open_says_what_the_library_said() -> None:
    capture = DoubledCapture([], opens=False)
    said = iter(["", "[rtsp @ 0x55] method DESCRIBE failed: 401 Unauthorized\n"])
    _, reason = until_lost(loop_over(capture, complaints=lambda: next(said)))
    assert reason == "it can't be opened (method DESCRIBE failed: 401 Unauthorized); `edge-client doctor` looks closer"
    assert capture.released


def test_a_picture_that_claims_to_be_larger_than_any_is_refused_before_it_is_fetched() -> None:
    capture = DoubledCapture([(MAX_SIDE + 1, 64)])
    pictures, reason = until_lost(loop_over(capture))
    assert not pictures
    assert capture.num_retrieved == 0
    assert "8193x64" in reason


@pytest.mark.skipif(not has_backend("FFMPEG"), reason="this OpenCV reads no files")
def test_a_real_file_with_too_wide_pictures_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "wide.avi"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (MAX_SIDE + 16, 16))
    writer.write(np.zeros((16, MAX_SIDE + 16, 3), np.uint8))
    writer.release()
    pictures, reason = until_lost(CaptureLoop("front", lambda: open_with(str(file), "FFMPEG"), 2.0))
    assert not pictures
    assert "8208x16" in reason


@pytest.mark.skipif(not has_backend("FFMPEG"), reason="this OpenCV reads no files")
def test_a_real_file_is_read_picture_by_picture(tmp_path: Path) -> None:
    file = tmp_path / "street.avi"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (320, 240))
    for number in range(5):
        writer.write(cv2.cvtColor(painted(number, 320, 240), cv2.COLOR_RGB2BGR))
    writer.release()
    pictures, reason = until_lost(CaptureLoop("front", lambda: open_with(str(file), "FFMPEG"), 2.0))
    assert [number_in(picture.pixels) for picture in pictures] == [0, 1, 2, 3, 4]
    assert reason == "its stream ended"


def test_pixels_that_are_no_eight_bit_colours_are_refused() -> None:
    _, reason = until_lost(loop_over(DoubledCapture([(192, 16)], dtype=np.uint16)))
    assert "uint16" in reason


def test_what_a_decoder_complains_about_is_thrown_away_for_it_shows_an_older_picture() -> None:
    said = iter(["", "", "", "", STALE, "[rtsp @ 0x1] RTP: missed 3 packets\n", ""])
    capture = DoubledCapture(4 * [(192, 16)])
    pictures, _ = until_lost(loop_over(capture, complaints=lambda: next(said, ""), step_s=0.01))
    assert [picture.frame_id for picture in pictures] == [0, 2, 3]


def test_what_a_decoder_says_of_the_next_picture_while_this_one_is_fetched_is_heard() -> None:
    said = iter(["", "", "", STALE])
    capture = DoubledCapture(4 * [(192, 16)])
    pictures, _ = until_lost(loop_over(capture, complaints=lambda: next(said, ""), step_s=0.01))
    assert [picture.frame_id for picture in pictures] == [0, 2, 3]


def test_a_picture_that_cant_be_made_rgb_is_thrown_away_for_it_shows_what_memory_held() -> None:
    said = iter(["", "", "", "", "", INTERLACED])  # before and after it is opened, then as it is grabbed and fetched
    capture = DoubledCapture(4 * [(192, 16)])
    pictures, _ = until_lost(loop_over(capture, complaints=lambda: next(said, ""), step_s=0.01))
    assert [picture.frame_id for picture in pictures] == [0, 2, 3]


def test_a_stream_of_damaged_pictures_only_is_a_lost_camera() -> None:
    said = itertools.chain(["", ""], itertools.repeat(STALE))
    pictures, reason = until_lost(loop_over(DoubledCapture(100 * [(192, 16)]), complaints=lambda: next(said)))
    assert not pictures
    assert reason == "it sends damaged pictures only (error count: 64)"


def test_reading_stops_when_asked() -> None:
    stop, capture = threading.Event(), DoubledCapture(10 * [(192, 16)])
    for picture in loop_over(capture).pictures(stop):
        if picture.frame_id == 3:
            stop.set()
    assert capture.num_retrieved == 4
    assert capture.released
