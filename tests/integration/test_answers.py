"""What cameras see, at a real broker: for a program of the operator's, and for Home Assistant."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paho.mqtt.client import Client as Mqtt
from paho.mqtt.client import MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion

from replayfleet.edge_client.flow import Answers, Inputs, Picture, Prediction, Shown
from replayfleet.edge_client.operator.answers import AnswerTopic, Place
from replayfleet.edge_client.settings import ClientSettings
from replayfleet.federation.errors import SettingsError
from tests.support.mosquitto import mosquitto, password_file
from tests.support.waiting import until


def seen(camera: str, frame_id: int, *, boxes: bool = True, count: int = 2) -> Shown:
    now = time.monotonic()
    picture = Picture(camera, frame_id, np.zeros((40, 60, 3), np.uint8), now)
    corners = np.array([[1, 2, 11.26, 12], [5, 6, 25, 26]], np.float32)[:count] if boxes else None
    answers = Answers(np.arange(count), np.array([0.25, 0.75], np.float32)[:count], corners)
    inputs = Inputs(np.zeros((count, 3, 8, 8), np.float32))
    return Shown(picture, inputs, Prediction(camera, frame_id, answers, 7, now, now))


class Listener:
    """Hears everything at a broker."""

    def __init__(self, port: int, user: tuple[str, str] | None = None) -> None:
        self.heard: list[tuple[str, bytes, bool]] = []
        self._mqtt = Mqtt(CallbackAPIVersion.VERSION2)
        if user is not None:
            self._mqtt.username_pw_set(*user)
        ready = threading.Event()
        self._mqtt.on_message = self._keep
        self._mqtt.on_subscribe = lambda *_: ready.set()
        self._mqtt.on_connect = lambda *_: self._mqtt.subscribe("#", 1)
        self._mqtt.connect("127.0.0.1", port)
        self._mqtt.loop_start()
        assert ready.wait(60)

    def _keep(self, client: Mqtt, data: Any, message: MQTTMessage) -> None:
        self.heard.append((message.topic, message.payload, message.retain))

    def of(self, topic: str) -> list[bytes]:
        return [payload for its, payload, _ in self.heard if its == topic]

    def close(self) -> None:
        self._mqtt.disconnect()
        self._mqtt.loop_stop()


@contextmanager
def listening(port: int, user: tuple[str, str] | None = None) -> Iterator[Listener]:
    with contextlib.closing(Listener(port, user)) as listener:
        yield listener


def opened(url: str, **options: Any) -> AnswerTopic:
    place = Place.parse(url)
    connect = place.connector(None, options.pop("password", None), insecure=False).to(place.broker, b"secret")
    return AnswerTopic(place, connect, "yard-cam-1", lambda: ("car", "bike"), every_s=0.01, **options)


def test_newest_answers_of_each_camera_are_published_and_its_presence(tmp_path: Path) -> None:
    with mosquitto(tmp_path, "allow_anonymous true") as port, listening(port) as listener:
        answers = opened(f"mqtt://127.0.0.1:{port}/home/yard/")
        until(lambda: listener.of("home/yard/status") == [b"online"])
        answers.watch(seen("front", 5))
        answers.watch(seen("back", 6, boxes=False, count=1))
        answers.watch(Shown(seen("left", 1).picture, seen("left", 1).inputs, None))
        until(lambda: listener.of("home/yard/cameras/front") and listener.of("home/yard/cameras/back"))
        answers.close()
        answers.close()
        until(lambda: listener.of("home/yard/status") == [b"online", b"offline"])
    (front,) = map(json.loads, listener.of("home/yard/cameras/front"))
    assert abs(front.pop("time") - time.time()) < 60
    assert front == {
        "camera": "front",
        "frame": 5,
        "version": 7,
        "size": [60, 40],
        "class": "bike",
        "count": 2,
        "answers": [
            {"class": "bike", "confidence": 0.75, "box": [5.0, 6.0, 25.0, 26.0]},
            {"class": "car", "confidence": 0.25, "box": [1.0, 2.0, 11.3, 12.0]},
        ],
    }
    (back,) = map(json.loads, listener.of("home/yard/cameras/back"))
    assert back["answers"] == [{"class": "car", "confidence": 0.25}]
    assert not listener.of("home/yard/cameras/left")
    assert not [topic for topic, _, _ in listener.heard if topic.startswith("homeassistant")]


def test_home_assistant_finds_every_camera_again_after_a_broker_that_forgot(tmp_path: Path) -> None:
    config = "homeassistant/sensor/yard-cam-1_front/config"
    with mosquitto(tmp_path, "allow_anonymous true") as port, listening(port) as listener:
        answers = opened(f"mqtt://127.0.0.1:{port}/yard", home_assistant=True)
        for frame_id in range(3):
            answers.watch(seen("front", frame_id))
            until(lambda count=frame_id + 1: len(listener.of("yard/cameras/front")) == count)
        (found,) = map(json.loads, listener.of(config))
        assert found["state_topic"] == found["json_attributes_topic"] == "yard/cameras/front"
        assert found["availability_topic"] == "yard/status"
        assert found["unique_id"] == "replayfleet_yard-cam-1_front"
        with listening(port) as later:
            until(lambda: later.of(config) and later.of("yard/status") == [b"online"])  # both are kept for newcomers
        answers.close()


def left_out(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    fields: list[dict[str, Any]] = [vars(record)["fields"] for record in caplog.records if "left out" in record.message]
    return [(each["camera"], str(each["reason"])) for each in fields]


def test_answers_that_no_message_can_hold_keep_no_other_camera_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mosquitto(tmp_path, "allow_anonymous true") as port, listening(port) as listener:
        answers = opened(f"mqtt://127.0.0.1:{port}/yard")
        broken = seen("a-front", 1)
        broken.prediction.answers.confidences[:] = np.nan

        def told() -> bool:
            answers.watch(broken)
            answers.watch(seen("b-rear", 2))
            return bool(listener.of("yard/cameras/b-rear"))

        until(told)
        answers.close()
        assert not listener.of("yard/cameras/a-front")
    assert [camera for camera, _ in left_out(caplog)] == ["a-front"]


def test_answers_larger_than_the_broker_takes_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mosquitto(tmp_path, "allow_anonymous true", "max_packet_size 1200") as port, listening(port) as listener:
        answers = opened(f"mqtt://127.0.0.1:{port}/yard")

        def told() -> bool:
            answers.watch(seen("front", 1))
            answers.watch(seen("rear", 2, boxes=False, count=0))
            return len(listener.of("yard/cameras/rear")) > 1

        until(told)
        answers.close()
    ((camera, reason),) = left_out(caplog)
    assert camera == "front"
    assert reason.endswith("the broker takes 176")


def test_a_broker_that_is_away_holds_up_nothing_and_gets_only_what_is_new(tmp_path: Path) -> None:
    with mosquitto(tmp_path, "allow_anonymous true") as port:
        pass
    answers = opened(f"mqtt://127.0.0.1:{port}/yard")
    begun = time.thread_time()
    for frame_id in range(1000):
        answers.watch(seen("front", frame_id))
    assert answers._newest["front"].picture.frame_id == 999
    assert time.thread_time() - begun < 5
    answers.close()


def test_a_broker_that_asks_for_a_password(tmp_path: Path) -> None:
    users = password_file(tmp_path, cam="secret", me="mine")
    (tmp_path / "cam.txt").write_text("cam\nsecret\n")
    config = ("allow_anonymous false", f"password_file {users}")
    with mosquitto(tmp_path, *config) as port, listening(port, ("me", "mine")) as listener:
        answers = opened(f"mqtt://127.0.0.1:{port}/yard", password=tmp_path / "cam.txt")
        answers.watch(seen("front", 1))
        until(lambda: listener.of("yard/cameras/front"))
        answers.close()


@pytest.mark.parametrize(
    "url",
    [
        "mqtts://host",
        "mqtts://host/",
        "mqtts://host/a/#",
        "mqtts://host/a/+/b",
        "mqtts://host/$SYS/a",
        "mqtts://host/a//b",
        "mqtts://host/" + "a" * 201,
        "mqtts://host/replayfleet/v1/yard",
        "mqtts://host/homeassistant/sensor",
        "mqtts://[::1/a",
        "mqtts://host/a?b=c",
        "mqtts://me:secret@host/#",
    ],
)
def test_a_place_that_takes_no_answers(url: str) -> None:
    with pytest.raises(SettingsError, match="--answers") as refused:
        Place.parse(url)
    assert "secret" not in str(refused.value)


def test_other_machines_are_told_nothing_in_plaintext_or_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "cam.txt").write_text("cam\nsecret\n")
    for url, file in (
        ("mqtt://far.example/yard", tmp_path / "cam.txt"),
        ("mqtts://far.example/yard", None),
        ("mqtt://far.example/yard", None),
    ):
        with pytest.raises(SettingsError, match="answers-insecure"):
            Place.parse(url).connector(None, file, insecure=False)
        Place.parse(url).connector(None, file, insecure=True)
    Place.parse("mqtts://far.example/yard").connector(None, tmp_path / "cam.txt", insecure=False)
    with pytest.raises(SettingsError, match="http"):
        Place.parse("http://far.example/yard").connector(None, None, insecure=True)


def test_the_fleet_s_password_goes_to_no_other_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYFLEET_MQTT_USER", "fleet")
    monkeypatch.setenv("REPLAYFLEET_MQTT_PASSWORD", "fleet's")
    with pytest.raises(SettingsError, match="answers-password-file"):
        Place.parse("mqtts://far.example/yard").connector(None, None, insecure=False)


def test_options_of_answers_need_answers(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="home_assistant does nothing without --answers"):
        ClientSettings(
            broker="mqtt://127.0.0.1",
            client_id="a",
            source="synthetic://",
            data_dir=tmp_path,
            home_assistant=True,
        )
