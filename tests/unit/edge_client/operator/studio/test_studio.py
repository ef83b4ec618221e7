from __future__ import annotations

import contextlib
import json
import locale
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from replayfleet.edge_client.flow import Answers, Boxes, Inputs, Picture, Prediction, Samples, Shown
from replayfleet.edge_client.learning.collector import Collector
from replayfleet.edge_client.learning.labels.operators_word import (
    IN_A_ROUND,
    REPLACED,
    AnyFeedback,
    BoxFeedback,
    Feedback,
    FeedbackRefused,
    NamedBox,
    TakeBack,
)
from replayfleet.edge_client.learning.settings import LearningSettings
from replayfleet.edge_client.operator.studio import waiting
from replayfleet.edge_client.operator.studio.app import MAX_BODY_BYTES, MAX_LIVE, Pages
from replayfleet.edge_client.operator.studio.studio import Known, Studio, jpeg
from replayfleet.edge_client.operator.studio.waiting import APART_S, WaitingFrames
from replayfleet.edge_client.settings import check_studio
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.web.access import Access
from replayfleet.federation.service.web.guard import Rules
from tests.support.asking import ask, stay_at

OURS = {"origin": "http://127.0.0.1:8080"}


def shown(frame: int, *confidences: float, camera: str = "front", boxes: Boxes | None = None) -> Shown:
    picture = Picture(camera, frame, np.full((24, 32, 3), 90, np.uint8), 0.0, boxes)
    inputs = Inputs(np.zeros((max(1, len(confidences)), 1, 2, 2), np.float32))
    if not confidences:
        return Shown(picture, inputs, None)
    answers = Answers(np.zeros(len(confidences), np.int64), np.array(confidences, np.float32))
    return Shown(picture, inputs, Prediction(camera, frame, answers, 1, 0.0, 0.0))


def keys(frames: WaitingFrames, now: float) -> list[int]:
    return [frame.key[1] for frame in frames.unsure_first(now)]


def test_the_least_certain_frame_comes_first_and_its_least_certain_object_is_asked_about() -> None:
    frames = WaitingFrames(60)
    frames.offer(shown(1, 0.9), 0)
    frames.offer(shown(2, 0.8, 0.3, 0.7), 1)
    frames.offer(shown(3), 2)  # no model yet: nothing is certain
    assert keys(frames, 3) == [3, 2, 1]
    found = frames.find(("front", 2), 3)
    assert found.index == 1


def test_frames_that_bring_their_annotation_and_neighbours_of_a_frozen_one_do_not_wait() -> None:
    frames = WaitingFrames(60)
    frames.offer(shown(1, 0.9, boxes=Boxes.none()), 0)
    frames.offer(shown(2, 0.9), 0)
    frames.offer(shown(3, 0.1), APART_S / 2)
    frames.offer(shown(4, 0.1, camera="rear"), APART_S / 2)
    frames.offer(shown(5, 0.2), APART_S)
    assert keys(frames, 1) == [4, 5, 2]


def test_no_frame_waits_longer_than_it_is_kept() -> None:
    frames = WaitingFrames(10)
    frames.offer(shown(1, 0.9), 0)
    assert keys(frames, 10) == [1]
    assert frames.find(("front", 1), 10.5) is None
    assert keys(frames, 10.5) == []


def test_of_more_than_fit_the_most_certain_go(monkeypatch: pytest.MonkeyPatch) -> None:
    one = WaitingFrames(60)
    one.offer(shown(0, 0.5), 0)
    size = one.unsure_first(0)[0].size_bytes
    monkeypatch.setattr(waiting, "MAX_BYTES", 2 * size)
    frames = WaitingFrames(60)
    for number, confidence in enumerate((0.2, 0.9, 0.4, 0.3)):
        frames.offer(shown(number, confidence), number)
    assert keys(frames, 4) == [0, 3]


class Client:
    """Learns into a real collector."""

    def __init__(self) -> None:
        self.collector = Collector(LearningSettings(min_samples=2, hold_out=0))
        self.learned: list[AnyFeedback] = []

    def learn(self, feedback: AnyFeedback, shown: Shown) -> TakeBack:
        assert (shown.picture.camera, shown.picture.frame_id) == (feedback.camera, feedback.frame_id)
        if isinstance(feedback, Feedback) and feedback.class_name not in {"cat", "<b>dog"}:
            raise FeedbackRefused(f"unknown class {feedback.class_name!r}")
        self.learned.append(feedback)
        samples = Samples(np.zeros((1, 1, 2, 2), np.float32), np.zeros(1, np.int64))
        self.collector.add(samples)
        return lambda: "" if self.collector.take_back(samples) else IN_A_ROUND

    def known(self) -> Known:
        return Known("cam-1", ("cat", "<b>dog"), 0, 1, self.collector.progress())


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def studio(client: Client) -> Studio:
    times = iter(range(10_000))
    made = Studio(client.known, client.learn, 600, lambda: float(next(times)))
    for frame, confidence in enumerate((0.9, 0.4, 0.6)):
        made.watch(shown(frame, confidence))
    return made


def test_a_labelled_frame_is_learned_and_waits_no_more(client: Client, studio: Studio) -> None:
    studio.label("front", 1, "cat")
    assert client.learned == [Feedback("front", 1, "cat", 0)]
    state = studio.state()
    assert [one["frame"] for one in state["waiting"]] == [2, 0]
    assert state["labels"]["have"] == 1
    with pytest.raises(FeedbackRefused, match="doesn't wait any more"):
        studio.label("front", 1, "cat")


def test_a_label_that_is_refused_leaves_its_frame_waiting(client: Client, studio: Studio) -> None:
    with pytest.raises(FeedbackRefused, match="unknown class"):
        studio.label("front", 1, "zebra")
    assert studio.state()["num_waiting"] == 3
    assert studio.state()["undo"] == ""


def test_labels_are_taken_back_newest_first_until_their_round_begins(client: Client, studio: Studio) -> None:
    studio.label("front", 1, "cat")
    studio.label("front", 2, "<b>dog")
    assert studio.undo() == "<b>dog"
    assert client.collector.progress().num_samples == client.collector.progress().num_pictures == 1
    assert [one["frame"] for one in studio.state()["waiting"]] == [2, 0], "what was taken back comes first"
    studio.label("front", 0, "cat")
    assert client.collector.round_samples(0) is not None
    with pytest.raises(FeedbackRefused, match="in a round already"):
        studio.undo()
    with pytest.raises(FeedbackRefused, match="no label to take back"):
        studio.undo()


def test_a_label_that_another_word_replaced_is_said_to_be_so_and_those_before_it_can_be_taken_back(
    client: Client, studio: Studio
) -> None:
    studio.label("front", 1, "cat")
    learn, client.learn = client.learn, lambda *_: lambda: REPLACED
    studio._learn = client.learn
    studio.label("front", 2, "cat")
    studio._learn = learn
    with pytest.raises(FeedbackRefused, match="another word about its frame"):
        studio.undo()
    assert studio.undo() == "cat"


def test_a_label_for_a_frame_of_before_a_restart_isnt_given_to_the_one_with_its_number(
    client: Client, asked: Callable[..., tuple[int, str]]
) -> None:
    session = json.loads(asked("/api/state")[1])["session"]
    about = {"camera": "front", "frame": 1, "class": "cat"}
    status, said = asked("/api/label", about | {"session": "another"}, **OURS)
    assert (status, "was restarted since" in said) == (422, True)
    assert not client.learned
    assert asked("/api/label", about | {"session": session}, **OURS)[0] == 200


def test_two_who_label_a_frame_at_once_label_it_once(client: Client, studio: Studio) -> None:
    both, learn = threading.Barrier(2), client.learn

    def slow(feedback: AnyFeedback, shown: Shown) -> TakeBack:
        time.sleep(0.05)  # whoever looked the frame up meanwhile would find it
        return learn(feedback, shown)

    studio._learn = slow

    def label() -> None:
        both.wait()
        with contextlib.suppress(FeedbackRefused):
            studio.label("front", 1, "cat")

    threads = [threading.Thread(target=label) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(client.learned) == 1


@pytest.mark.parametrize("size", [(1, 8192), (8192, 1), (3, 2000)])
def test_a_picture_of_any_shape_becomes_a_jpeg(size: tuple[int, int]) -> None:
    for most in (None, 10_000):
        assert jpeg(np.zeros((*size, 3), np.uint8), None, most, 240).startswith(b"\xff\xd8")


def test_a_held_out_label_is_taken_back_too() -> None:
    collector = Collector(LearningSettings(min_samples=2, hold_out=2))
    first, samples = (Samples(np.zeros((1, 1, 2, 2), np.float32), np.zeros(1, np.int64)) for _ in range(2))
    collector.add(first)
    collector.add(samples)
    assert collector.held_out() is not None
    assert collector.take_back(samples)
    assert collector.held_out() is None
    assert not collector.take_back(samples)


@pytest.fixture
def asked(studio: Studio) -> Callable[..., tuple[int, str]]:
    app = Pages(studio, Rules(frozenset({"127.0.0.1"}), Access(None, reading_needs_token=False))).app

    def call(url: str, body: object = None, **headers: str) -> tuple[int, str]:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        said = ask(app, url, "GET" if body is None else "POST", body=sent, **headers)
        return said.status, said.body.decode(errors="replace")

    return call


def test_pages_of_others_can_neither_look_nor_label(asked: Callable[..., tuple[int, str]], client: Client) -> None:
    body = {"camera": "front", "frame": 1, "class": "cat"}
    assert asked("/api/state", host="evil.example")[0] == 421
    for headers in ({"origin": "http://evil.example"}, {}, {"origin": "null"}, {"sec_fetch_site": "cross-site"}):
        assert asked("/api/label", body, **headers)[0] == 403
    assert client.learned == []
    assert asked("/api/label", body, **OURS)[0] == 200
    assert len(client.learned) == 1


def test_who_comes_for_live_pictures_when_all_places_are_taken_is_told_and_takes_none(studio: Studio) -> None:
    app = Pages(studio, Rules(frozenset({"127.0.0.1"}), Access(None, reading_needs_token=False))).app
    for _ in range(2):  # places are given back
        assert sorted(stay_at(app, "/live?camera=front", MAX_LIVE + 2)) == [200] * MAX_LIVE + [503] * 2


def test_its_page_is_the_same_wherever_the_device_stands(asked: Callable[..., tuple[int, str]]) -> None:
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")  # text is ASCII, unless somebody says otherwise
    try:
        assert "\u00b7" in asked("/static/studio.js")[1]
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


@pytest.mark.parametrize(
    ("url", "body", "status"),
    [
        ("/api/label", b"{", 422),
        ("/api/label", b'{"camera": "front", "frame": 1e99, "class": "cat"}', 422),
        ("/api/label", b'{"camera": "front", "frame": 1, "class": "zebra"}', 422),
        ("/api/label", b"\xff" * (MAX_BODY_BYTES + 1), 413),
        ("/api/undo", b"{}", 422),
        ("/api/boxes", b'{"camera": "front", "frame": 1, "boxes": [{"class": "cat", "box": [1, 2, 3]}]}', 422),
        ("/api/boxes", b'{"camera": "front", "frame": 1, "boxes": [{"class": "cat", "box": [1, 2, 3, null]}]}', 422),
        ("/api/boxes", b'{"camera": "front", "frame": 77, "boxes": []}', 422),
        ("/api/boxes", b'{"frame": 1}', 422),
        ("/api/boxes", b'{"camera": "front", "frame": 1}', 422),
        ("/api/boxes", b'{"camera": "front", "frame": 1, "class": "cat", "boxes": []}', 422),
        ("/api/label", b'{"camera": "front", "frame": 1}', 422),
        ("/api/skip", b'{"camera": "x", "frame": 1}', 200),
        ("/frame?camera=front&frame=-1", None, 422),
        ("/frame?camera=front&frame=%C2%B2", None, 422),
        ("/frame?camera=front&frame=77", None, 404),
        ("/static/..%2fapp.py", None, 404),
        ("/static/studio.html", None, 404),
    ],
)
def test_rubbish_gets_an_answer_in_words(
    url: str, body: bytes | None, status: int, asked: Callable[..., tuple[int, str]]
) -> None:
    found, text = asked(url, body, **OURS)
    assert found == status
    assert "Traceback" not in text


def test_a_detectors_frame_waits_though_nothing_was_found_behind_what_it_hardly_believes() -> None:
    frames = WaitingFrames(60)
    nothing = shown(2)
    found = Prediction("front", 2, Answers.none(), 1, 0.0, 0.0)
    frames.offer(shown(1, 0.9), 0)
    frames.offer(Shown(nothing.picture, nothing.inputs, found), 1)
    frames.offer(shown(3, 0.3), 2)
    assert keys(frames, 3) == [3, 2, 1]


def test_boxes_are_learned_together_and_taken_back_together(client: Client, studio: Studio) -> None:
    boxes = (NamedBox("cat", (1, 2, 3, 4)), NamedBox("cat", (5, 2, 9, 4)))
    studio.label_boxes("front", 1, boxes)
    assert client.learned == [BoxFeedback("front", 1, boxes)]
    assert studio.undo() == "2 boxes"
    assert client.collector.progress().num_samples == 0
    studio.label_boxes("front", 1, boxes[:1])
    assert studio.state()["undo"] == "1 box"


def test_a_waiting_frame_is_a_jpeg(asked: Callable[..., tuple[int, str]]) -> None:
    status, text = asked("/frame?camera=front&frame=1")
    assert status == 200
    assert "JFIF" in text[:20]


def test_the_studio_is_for_this_machine_alone() -> None:
    check_studio("127.0.0.1:8090")
    check_studio("[::1]:0")
    check_studio("")
    with pytest.raises(SettingsError, match="expected an address on loopback"):
        check_studio("0.0.0.0:8090")
