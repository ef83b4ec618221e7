"""The capture process's inner life, without a process: at most one picture waits, and it is the newest."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from replayfleet.edge_client.cameras.live.wire import FromWorker, Lost, Taken
from replayfleet.edge_client.cameras.live.worker import Desk, serve
from replayfleet.edge_client.flow import CameraError, Picture


def picture(frame_id: int) -> Picture:
    return Picture("front", frame_id, np.zeros((2, 3, 3), np.uint8), float(frame_id))


class Answers:
    def __init__(self) -> None:
        self.all: list[FromWorker] = []

    def __call__(self, message: FromWorker, picture: Picture | None) -> None:
        self.all.append(message)


def test_a_wanted_picture_is_the_newest_and_goes_out_once() -> None:
    answers = Answers()
    desk = Desk(answers)
    for frame_id in range(5):
        desk.offer(picture(frame_id))
    desk.want()
    desk.want()
    assert answers.all == [Taken(4, 4.0, 3, 2)]
    desk.offer(picture(5))
    assert answers.all == [Taken(4, 4.0, 3, 2), Taken(5, 5.0, 3, 2)]


def test_nothing_goes_out_that_nobody_wants() -> None:
    answers = Answers()
    desk = Desk(answers)
    desk.offer(picture(0))
    desk.lose("unplugged")
    assert answers.all == []


def test_a_loss_is_the_answer_to_one_wish_and_says_how_many_were_captured() -> None:
    answers = Answers()
    desk = Desk(answers)
    desk.offer(picture(7))
    desk.lose("unplugged\nby the wind")
    desk.want()
    assert answers.all == [Lost("unplugged by the wind", 8)]
    desk.want()
    assert len(answers.all) == 1
    desk.lose("still unplugged")
    assert answers.all[1:] == [Lost("still unplugged", 8)]


class Flaky:
    """A camera that gives two pictures whenever it is opened."""

    name, live, class_names = "front", True, ()

    def __init__(self, desk: Desk, num_opens: int) -> None:
        self._desk, self._num_opens, self.opened = desk, num_opens, 0

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        self.opened += 1
        if self.opened == self._num_opens:
            self._desk.close()
        yield picture(2 * self.opened)
        yield picture(2 * self.opened + 1)
        raise CameraError("unplugged")

    def describe(self) -> str:
        return "a double"


def test_a_lost_camera_is_opened_again_only_when_a_picture_is_wanted_again() -> None:
    answers = Answers()
    desk = Desk(answers)
    camera = Flaky(desk, num_opens=1)
    desk.want()
    serve(lambda: camera, desk, threading.Event())
    assert camera.opened == 1
    assert answers.all == [Taken(2, 2.0, 3, 2)]
    desk.want()
    assert answers.all[1:] == [Lost("unplugged", 4)]


def test_a_camera_that_can_not_even_be_built_is_a_lost_one() -> None:
    answers = Answers()
    desk = Desk(answers)

    def build() -> Flaky:
        desk.close()
        raise ModuleNotFoundError("No module named 'cv2'")

    desk.want()
    serve(build, desk, threading.Event())
    assert answers.all == [Lost("ModuleNotFoundError: No module named 'cv2'", 0)]
