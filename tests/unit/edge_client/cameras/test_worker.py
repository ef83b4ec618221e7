"""The capture process's inner life, without a process: at most one picture waits, and it is the newest."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import numpy as np

from replayfleet.edge_client.cameras.live.wire import Alive, FromWorker, Lost, Said, Taken
from replayfleet.edge_client.cameras.live.worker import Desk, serve
from replayfleet.edge_client.flow import Boxes, CameraError, Picture


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


def test_a_camera_that_works_on_without_a_picture_says_so_to_whoever_waits_and_to_nobody_else() -> None:
    answers = Answers()
    desk = Desk(answers)
    desk.alive()
    assert answers.all == []
    desk.want()
    desk.alive()
    desk.offer(picture(3))
    desk.alive()
    assert answers.all == [Alive(), Taken(3, 3.0, 3, 2)]


def test_lines_for_the_log_wait_for_the_next_wish_and_do_not_pile_up() -> None:
    answers = Answers()
    desk = Desk(answers)
    for number in range(500):
        desk.say(Said(False, "carla picture lost", {"frame": str(number)}))
    desk.offer(picture(0))
    assert answers.all == []
    desk.want()
    *lines, taken = answers.all
    assert [line.fields["frame"] for line in lines if isinstance(line, Said)] == [str(n) for n in range(400, 500)]
    assert taken == Taken(0, 0.0, 3, 2)


def test_boxes_and_place_travel_with_the_head_of_their_picture() -> None:
    answers = Answers()
    desk = Desk(answers)
    corners = np.array([[0.5, 0, 2, 2]], np.float32)
    desk.offer(dataclasses.replace(picture(0), boxes=Boxes(corners, np.array([4])), place="Town03"))
    desk.want()
    desk.offer(dataclasses.replace(picture(1), boxes=Boxes.none()))
    desk.want()
    assert answers.all == [
        Taken(0, 0.0, 3, 2, "Town03", [(0.5, 0.0, 2.0, 2.0)], [4]),
        Taken(1, 1.0, 3, 2, "", [], []),
    ]


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
