from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from replayfleet.edge_client.flow import Answers, Boxes, Inputs, Picture, Prediction, Shown
from replayfleet.edge_client.operator.display import recorder as recording
from replayfleet.edge_client.operator.display.drawing import MIN_WIDTH, Legend, drawn
from replayfleet.edge_client.operator.display.recorder import MAX_WAITING, Film, Recorder, check_film
from replayfleet.edge_client.operator.display.window import Window, check_display
from replayfleet.federation.errors import SettingsError
from tests.support.waiting import until

LEGEND = Legend(("car", "bike"), ("car", "bike"), 4)
CORNERS = np.array([[100, 100, 200, 180], [300, 120, 420, 240]], np.float32)


def shown(
    frame_id: int = 0, said: tuple[int, ...] = (0, 1), size: tuple[int, int] = (480, 320), rate: float = 10.0
) -> Shown:
    width, height = size
    pixels = np.full((height, width, 3), 40, np.uint8)
    picture = Picture("front", frame_id, pixels, frame_id / rate, Boxes(CORNERS, np.array([0, 1])), "Town01")
    answers = Answers(np.array(said), np.full(len(said), 0.9, np.float32), CORNERS[: len(said)])
    inputs = Inputs(np.zeros((len(said), 1, 2, 2), np.float32), CORNERS[: len(said)], np.arange(len(said)))
    return Shown(picture, inputs, Prediction("front", frame_id, answers, 7, picture.captured_at, picture.captured_at))


def test_a_drawing_has_even_sides_and_leaves_the_picture_itself_alone() -> None:
    for size in ((481, 321), (28, 28)):
        found = shown(size=size)
        before = found.picture.pixels.copy()
        image = drawn(found, LEGEND)
        assert image.dtype == np.uint8
        assert image.shape[0] % 2 == image.shape[1] % 2 == 0
        assert image.shape[1] >= MIN_WIDTH
        assert np.array_equal(found.picture.pixels, before)


def test_a_thin_picture_is_not_enlarged_to_gigabytes() -> None:
    for height, width in ((8192, 1), (1, 8192)):
        thin = Shown(Picture("front", 0, np.zeros((height, width, 3), np.uint8), 0.0), None, None)
        assert drawn(thin, Legend((), (), 0)).nbytes < 10**6


def test_boxes_are_drawn_where_the_objects_are_and_a_mistake_has_a_second_word() -> None:
    right, wrong = drawn(shown(said=(0, 1)), LEGEND), drawn(shown(said=(0, 0)), LEGEND)
    assert (right[140, 100] != 40).any()  # left edge of the first box
    assert (right[140, 150] == 40).all()  # its middle
    below = np.s_[242:256, 300:420]
    assert (right[below] == 40).all()
    assert (wrong[below] != 40).any()


def test_a_box_that_fills_the_picture_has_four_sides() -> None:
    pixels = np.zeros((320, 480, 3), np.uint8)
    all_of_it = Boxes(np.array([[0, 0, 480, 320]], np.float32), np.array([0]))
    image = drawn(Shown(Picture("front", 0, pixels, 0.0, all_of_it), Inputs(np.zeros((0, 1, 2, 2))), None), LEGEND)
    for side in (image[160, 0], image[0, 240], image[160, 479], image[319, 240]):
        assert side.tolist() == [255, 255, 255]


def test_a_picture_without_a_model_or_boxes_or_with_absurd_boxes_can_be_drawn() -> None:
    bare = Picture("front", 1, np.zeros((100, 100, 3), np.uint8), 0.0)
    assert drawn(Shown(bare, Inputs(np.zeros((1, 1, 2, 2), np.float32)), None), LEGEND).any()  # the line of text
    far = Boxes(np.array([[-1e9, -1e9, 1e9, 1e9]], np.float32), np.array([9]))
    drawn(Shown(Picture("front", 1, bare.pixels, 0.0, far), Inputs(np.zeros((0, 1, 2, 2), np.float32)), None), LEGEND)


def film(path: Path) -> tuple[int, float, tuple[int, int]]:
    found = cv2.VideoCapture(str(path))
    count = 0
    while found.read()[0]:
        count += 1
    size = int(found.get(cv2.CAP_PROP_FRAME_WIDTH)), int(found.get(cv2.CAP_PROP_FRAME_HEIGHT))
    return count, found.get(cv2.CAP_PROP_FPS), size


def test_a_film_has_every_picture_at_the_cameras_own_rate(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "out.webm", lambda _: LEGEND)
    for frame_id in range(12):
        while recorder._waiting.qsize() >= MAX_WAITING - 1:
            pass
        recorder.watch(shown(frame_id, rate=20.0, size=(480, 320) if frame_id < 10 else (500, 200)))
    recorder.close()
    recorder.close()
    assert recorder.num_left_out == 0
    count, rate, size = film(tmp_path / "out.webm")
    assert (count, size) == (12, (480, 346))
    assert rate == pytest.approx(20.0, abs=0.5)


def test_a_film_is_webm_with_vp8_which_every_browser_plays(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "out.webm", lambda _: LEGEND)
    recorder.watch(shown())
    recorder.close()
    data = (tmp_path / "out.webm").read_bytes()
    # Matroska's elements: EBML header, DocType, and the one track's CodecID, each as id, length, text.
    assert data.startswith(b"\x1a\x45\xdf\xa3")
    assert b"\x42\x82\x84webm" in data[:64]
    assert data.count(b"\x86\x85V_VP8") == 1
    assert data.count(b"\x86\x85V_") == 1


def test_few_pictures_are_a_film_too_and_several_cameras_are_several_films(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "out.webm", lambda _: LEGEND, num_cameras=2)
    recorder.watch(shown(0))
    recorder.watch(shown(1))
    recorder.close()
    assert film(tmp_path / "out-front.webm")[0] == 2


def test_a_stream_that_grows_is_shrunk_to_its_film(tmp_path: Path) -> None:
    found = Film(tmp_path / "out.webm", 10.0, (480, 346))
    found.write(np.zeros((346, 480, 3), np.uint8))
    grown = np.zeros((746, 960, 3), np.uint8)
    grown[-26:] = 255  # the line of text
    found.write(grown)
    found.close()
    capture = cv2.VideoCapture(str(tmp_path / "out.webm"))
    capture.read()
    _, last = capture.read()
    capture.release()
    assert last[:320, :440].max() < 80
    assert last[-8:, :440].min() > 180


def test_an_earlier_film_stays(tmp_path: Path) -> None:
    for count in (3, 5, 4):
        recorder = Recorder(tmp_path / "out.webm", lambda _: LEGEND)
        for frame_id in range(count):
            recorder.watch(shown(frame_id))
        recorder.close()
    assert [film(tmp_path / name)[0] for name in ("out.webm", "out-2.webm", "out-3.webm")] == [3, 5, 4]


def test_a_film_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"should end in \.webm"):
        check_film(tmp_path / "out.avi")
    with pytest.raises(SettingsError, match="doesn't exist"):
        check_film(tmp_path / "absent" / "out.webm")


def test_a_window_without_a_display_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(SettingsError, match="--record"):
        check_display()


def test_what_is_left_out_is_counted_for_each_film(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    drawing = threading.Event()

    def legend(camera: str) -> Legend:
        drawing.wait(60)
        return LEGEND

    recorder = Recorder(tmp_path / "out.webm", legend, num_cameras=2)
    for camera, count in (("front", 8), ("rear", MAX_WAITING + 20)):
        for frame_id in range(count):
            recorder.watch(seen_by(camera, frame_id))
            if camera == "front":
                time.sleep(0.01)
    drawing.set()
    recorder.close()
    left_out = {vars(record)["fields"]["camera"]: vars(record)["fields"]["left_out"] for record in caplog.records}
    assert left_out == {"front": 0, "rear": recorder.num_left_out}
    assert recorder.num_left_out >= 10


def test_a_film_ends_where_the_disk_is_full_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Frames that didn't fit were lost without a word, and counted."""
    room = iter([1 << 40] * 9)
    monkeypatch.setattr(recording.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(room, 0)))
    recorder = Recorder(tmp_path / "out.webm", lambda _: LEGEND)
    for frame_id in range(12):
        recorder.watch(shown(frame_id))
        while recorder._waiting.qsize():
            time.sleep(0.001)
    recorder.close()
    assert "film stopped" in caplog.text
    assert film(tmp_path / "out.webm")[0] == 9
    assert recorder.num_left_out == 2  # the one that didn't fit is in the log


def test_a_film_that_cannot_begin_at_the_end_leaves_the_others_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a camera that gave a few pictures only: closing waited half a minute, and the other films weren't ended."""
    room = iter([1 << 40] * 8)
    monkeypatch.setattr(recording.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(room, 0)))
    recorder = Recorder(tmp_path / "out.webm", lambda _: LEGEND, num_cameras=2)
    for frame_id in range(8):
        recorder.watch(shown(frame_id))
    recorder.watch(seen_by("rear", 0))
    recorder.close()
    assert not recorder._thread.is_alive()
    assert "film stopped" in caplog.text
    assert film(tmp_path / "out-front.webm")[0] == 8


def test_large_pictures_wait_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_WAITING_BYTES", 3 * shown().picture.pixels.nbytes)
    drawing, drawn_first = threading.Event(), threading.Event()

    def legend(_: str) -> Legend:
        drawn_first.set()
        drawing.wait(60)
        return LEGEND

    recorder = Recorder(tmp_path / "out.webm", legend)
    for frame_id in range(4):  # whose rate is measured: the fourth is more than may be held
        recorder.watch(shown(frame_id))
        while recorder._waiting.qsize():
            time.sleep(0.001)
    assert drawn_first.wait(60)
    for frame_id in range(4, 12):
        recorder.watch(shown(frame_id))
    assert recorder.num_left_out == 4
    drawing.set()
    recorder.close()
    assert film(tmp_path / "out.webm")[0] == 8


class Screen:
    """OpenCV's windows, which the headless OpenCV of tests doesn't have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: dict[str, np.ndarray] = {}
        self.key = -1
        self.destroyed = threading.Event()
        monkeypatch.setenv("DISPLAY", ":0")
        monkeypatch.setattr(cv2, "getBuildInformation", lambda: "General\n  GUI:                 QT5\n")
        monkeypatch.setattr(cv2, "imshow", self.shown.__setitem__, raising=False)
        monkeypatch.setattr(cv2, "waitKey", self.wait_key, raising=False)
        monkeypatch.setattr(cv2, "destroyAllWindows", self.destroyed.set, raising=False)

    def wait_key(self, delay_ms: int) -> int:
        time.sleep(delay_ms / 1000)
        return self.key


@pytest.mark.parametrize("ends_by", ["q", "close"])
def test_every_camera_has_a_window_with_its_newest_picture_drawn(ends_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    window = Window(lambda _: LEGEND)
    try:
        for frame_id in range(3):
            for camera in ("front", "rear"):
                window.watch(seen_by(camera, frame_id))
        expected = {camera: drawn(seen_by(camera, 2), LEGEND)[:, :, ::-1] for camera in ("front", "rear")}
        until(lambda: all(np.array_equal(screen.shown.get(name), image) for name, image in expected.items()))
        if ends_by == "q":
            screen.key = ord("q")
            assert screen.destroyed.wait(60)
            window.watch(seen_by("front", 4))  # serving goes on
    finally:
        window.close()
        window.close()
    assert screen.destroyed.is_set()


def seen_by(camera: str, frame_id: int) -> Shown:
    found = shown(frame_id)
    assert found.prediction is not None
    return dataclasses.replace(
        found,
        picture=dataclasses.replace(found.picture, camera=camera),
        prediction=dataclasses.replace(found.prediction, camera=camera),
    )
