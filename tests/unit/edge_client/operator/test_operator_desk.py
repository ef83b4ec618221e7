from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from replayfleet.edge_client.flow import Answers, Inputs, Picture, Prediction, Shown
from replayfleet.edge_client.learning.labels.operators_word import (
    AnyFeedback,
    BoxFeedback,
    Feedback,
    FeedbackRefused,
    NamedBox,
)
from replayfleet.edge_client.operator.operator_desk import OperatorDesk
from replayfleet.federation.service.health import MAX_BODY_BYTES, HealthServer


def shown(answers: Answers, frame_id: int = 7) -> Shown:
    picture = Picture("front", frame_id, np.zeros((4, 4, 3), np.uint8), 10.0)
    return Shown(
        picture, Inputs(np.zeros((1, 1, 2, 2), np.float32)), Prediction("front", frame_id, answers, 3, 10.0, 10.1)
    )


def desk(learnt: list[AnyFeedback] | None = None) -> OperatorDesk:
    def learn(feedback: AnyFeedback) -> None:
        if feedback.frame_id == 404:
            raise FeedbackRefused("frame 404 isn't kept")
        if learnt is not None:
            learnt.append(feedback)

    return OperatorDesk(lambda: ("cat", "dog"), learn, lambda: 10.5)


def test_the_newest_prediction_of_every_camera_can_be_asked_for() -> None:
    found = desk()
    corners = np.array([[1, 2, 3, 4]], np.float32)
    found.watch(shown(Answers(np.array([0]), np.array([0.5], np.float32)), frame_id=6))
    found.watch(shown(Answers(np.array([1]), np.array([0.75], np.float32), corners)))
    status, answer = found.predictions(b"")
    assert status is HTTPStatus.OK
    assert answer["cameras"] == {
        "front": {
            "frame": 7,
            "age_s": 0.5,
            "version": 3,
            "answers": [{"class": "dog", "confidence": 0.75, "box": [1.0, 2.0, 3.0, 4.0]}],
        }
    }


def test_a_word_about_a_frame_of_an_earlier_start_isnt_taken_for_one_of_this() -> None:
    learnt: list[AnyFeedback] = []
    now, before = desk(learnt), desk()

    def said(session: str) -> bytes:
        return json.dumps({"frame": 8, "class": "dog", "session": session}).encode()

    assert now.feedback(said(now.predictions(b"")[1]["session"]))[0] is HTTPStatus.OK
    with pytest.raises(FeedbackRefused, match="restarted"):
        now.take(said(before.predictions(b"")[1]["session"]))
    assert learnt == [Feedback("", 8, "dog", None)]


def test_a_prediction_says_how_many_objects_it_left_out() -> None:
    found = desk()
    found.watch(shown(Answers(np.array([1]), np.array([0.75], np.float32), np.zeros((1, 4), np.float32), 12)))
    assert found.predictions(b"")[1]["cameras"]["front"]["left_out"] == 12


def test_feedback_reaches_whoever_learns() -> None:
    learnt: list[AnyFeedback] = []
    status, answer = desk(learnt).feedback(b'{"camera": "front", "frame": 7, "class": "cat", "object": 2}')
    assert (status, answer) == (HTTPStatus.OK, {"accepted": True})
    desk(learnt).take(b'{"frame": 8, "class": "dog"}')
    assert learnt == [Feedback("front", 7, "cat", 2), Feedback("", 8, "dog", None)]


def test_boxes_are_posted_as_predictions_are_written_and_none_is_something_to_say() -> None:
    learnt: list[AnyFeedback] = []
    box = b'{"class": "cat", "box": [1, 2.5, 3, 4]}'
    status, answer = desk(learnt).feedback(b'{"camera": "front", "frame": 7, "boxes": [%s]}' % box)
    assert (status, answer) == (HTTPStatus.OK, {"accepted": True})
    desk(learnt).take(b'{"frame": 8, "boxes": []}')
    assert learnt == [BoxFeedback("front", 7, (NamedBox("cat", (1.0, 2.5, 3.0, 4.0)),)), BoxFeedback("", 8, ())]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"no json", "feedback isn't usable"),
        (b'{"frame": "seven", "class": "cat"}', "expected int"),
        (b'{"frame": 7}', "class"),
        (b'{"frame": 7, "class": "cat", "clas": 1}', "clas"),
        (b'{"frame": 404, "class": "cat"}', "isn't kept"),
        (b'{"frame": 404, "boxes": []}', "isn't kept"),
        (b'{"frame": 7, "boxes": [], "class": "cat"}', "classes of their own"),
        (b'{"frame": 7, "boxes": [], "object": 0}', "classes of their own"),
        (b'{"frame": 7, "boxes": [{"box": [1, 2, 3, 4]}]}', "class"),
        (b'{"frame": 7, "boxes": [{"class": "cat", "box": [1, 2, 3]}]}', "length 4"),
        (b'{"frame": 7, "boxes": [{"class": "cat", "box": [1, 2, 3, "4"]}]}', "expected float"),
        (b'{"frame": 7, "boxes": [{"class": "cat", "box": [1, 2, 3, NaN]}]}', "malformed"),
        (b" " * (MAX_BODY_BYTES + 1), "at most"),
    ],
)
def test_feedback_that_cannot_be_used_is_answered_with_the_reason(body: bytes, message: str) -> None:
    status, answer = desk().feedback(body)
    assert status is HTTPStatus.UNPROCESSABLE_ENTITY
    assert answer["accepted"] is False
    assert message.lower() in str(answer["error"]).lower()


@pytest.fixture
def url() -> Any:
    found = desk()

    server = HealthServer(CollectorRegistry())
    posted = {"/feedback": found.feedback, "/broken": Mock(side_effect=RuntimeError("bug"))}
    server.answer(lambda: {"healthy": True}, get={"/predictions": found.predictions}, post=posted)
    yield server.url
    server.stop()


def post(url: str, body: bytes, content_type: str = "application/json") -> tuple[int, Any]:
    request = urllib.request.Request(url, body, {"Content-Type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_over_http_feedback_is_taken_and_mistakes_are_answered(url: str) -> None:
    assert post(f"{url}/feedback", b'{"frame": 7, "class": "cat"}') == (200, {"accepted": True})
    assert post(f"{url}/feedback", b"{}")[0] == 422
    assert post(f"{url}/feedbac", b"{}")[0] == 404
    assert post(f"{url}/feedback", b"{}", "text/plain")[0] == 415  # what a foreign web page may send without asking
    assert post(f"{url}/feedback", b" " * (MAX_BODY_BYTES + 1))[0] == 413
    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as in_pieces:
        in_pieces.putrequest("POST", "/feedback")
        in_pieces.putheader("Content-Type", "application/json")
        in_pieces.putheader("Transfer-Encoding", "chunked")
        in_pieces.endheaders()
        assert in_pieces.getresponse().status == 411
    assert post(f"{url}/broken", b"{}") == (500, {"error": "see the log"})
    with urllib.request.urlopen(f"{url}/predictions", timeout=60) as answer:
        assert json.load(answer)["cameras"] == {}


@pytest.mark.parametrize(
    "body", [b"\xff", b'{"frame": 1, "class": "\xff"}', b'{"frame": 1, "boxes": ' + b"[" * 3000, b"", b"7"], ids=repr
)
def test_bytes_that_are_no_feedback_are_refused_and_nothing_else(body: bytes) -> None:
    status, answer = desk().feedback(body)
    assert status is HTTPStatus.UNPROCESSABLE_ENTITY
    assert "isn't usable" in answer["error"]
