"""An operator elsewhere: whom a device shows its pictures and believes, and what strangers at the broker can't do."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from replayfleet.edge_client.flow import Picture, Shown
from replayfleet.edge_client.frames.views import Detector
from replayfleet.edge_client.learning.labels.operators_word import FeedbackRefused, NamedBox
from replayfleet.edge_client.learning.settings import LearningSettings
from replayfleet.edge_client.operator.studio.remote import RemoteStudio
from replayfleet.edge_client.operator.studio.sharing import QUESTIONS_AT_ONCE, SharedStudio, operator_key
from replayfleet.edge_client.operator.studio.studio import Studio
from replayfleet.edge_client.operator.studio.words import MAX_QUESTION_BYTES, decode_answer
from replayfleet.edge_client.sources import source_opener
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.federation.wire.transport.broker import find_mosquitto
from replayfleet.federation.wire.transport.broker_address import TlsSettings
from replayfleet.federation.wire.transport.connecting import Connector
from replayfleet.federation.wire.transport.interfaces import OnMessage, Session, Will
from replayfleet.federation.wire.transport.seal import Signer, unseal
from replayfleet.models.specs import TaskSpec
from tests.integration.test_studio import film
from tests.support.client_world import World
from tests.support.memory_broker import MemoryBroker
from tests.support.mosquitto import mosquitto
from tests.support.studio_device import HEIGHT, TASK, WIDTH, Device

TO_DEVICE, FROM_DEVICE = topic_of("yard", "feedback", "cam-1"), topic_of("yard", "studio", "cam-1")
CAR = NamedBox("car", (10.0, 20.0, 60.0, 70.0))


class Yard:
    """A device that shares its studio with one operator, over a broker in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broker = MemoryBroker()
        self.device = Device(folder)
        self.operator, self.own = Signer(Ed25519PrivateKey.generate()), Signer(Ed25519PrivateKey.generate())
        self.refused: list[str] = []
        self.heard: list[bytes] = []
        self.session = self.broker.session("device", on_message=self._hear)
        self.session.subscribe((TO_DEVICE,))
        self.session.start()
        self.listener = self.broker.session("listener", on_message=lambda topic, payload: self.heard.append(payload))
        self.listener.subscribe((FROM_DEVICE, TO_DEVICE))
        self.listener.start()
        self.max_bytes = 1 << 20
        self.now = 0.0
        self.shared = self.share()

    def share(self) -> SharedStudio:
        def answer(frame: bytes) -> None:
            self.session.publish(FROM_DEVICE, self.own.seal(FROM_DEVICE, frame))

        key = self.operator.public_key
        self.device.studio.session = secrets.token_hex(8)  # as each start of a device makes one
        return SharedStudio(self.device.studio, key, self.own, TO_DEVICE, answer, lambda: self.max_bytes)

    def studio(self, signer: Signer | None = None, answer_s: float = 20.0) -> RemoteStudio:
        def connect(client_id: str, on_message: OnMessage, will: Will | None) -> Session:
            return self.broker.session(client_id, on_message=on_message, will=will)

        return RemoteStudio("yard", "cam-1", connect, signer or self.operator, self.folder / "known", answer_s)

    def _hear(self, topic: str, payload: bytes) -> None:
        try:
            self.shared.hear(payload, self.now)
        except FeedbackRefused as refused:
            self.refused.append(str(refused))


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    made = Yard(tmp_path)
    yield made
    made.shared.close()


def test_an_operator_elsewhere_sees_labels_and_takes_back(yard: Yard) -> None:
    yard.device.see(1, (10, 10, 50, 50))
    there = yard.studio()
    state = there.state()
    assert state["remote"]
    assert [one["frame"] for one in state["waiting"]] == [1]
    picture = there.frozen("front", 1)
    assert picture[:3] == b"\xff\xd8\xff"
    newest = there.newest("front")
    assert newest[1]()[:3] == b"\xff\xd8\xff"
    there.label_boxes("front", 1, [CAR])
    assert len(yard.device.learned()) == 1
    with pytest.raises(FeedbackRefused, match="doesn't wait any more"):
        there.label_boxes("front", 1, [CAR])
    assert there.frozen("front", 1) is None
    assert there.undo() == "1 box"
    assert yard.device.learned() == []
    there.skip("front", 1)
    assert there.state()["num_waiting"] == 0


def test_of_more_waiting_frames_than_a_message_holds_the_first_are_shown(yard: Yard) -> None:
    for frame in range(1, 13):
        yard.device.see(frame, (10, 10, 50, 50))
    there = yard.studio()
    every = there.state()
    yard.max_bytes = 3500
    some = there.state()
    shown, waiting = ([one["frame"] for one in state["waiting"]] for state in (some, every))
    assert 0 < len(shown) < 12 == len(waiting)
    assert shown == waiting[: len(shown)]
    assert some["num_waiting"] == 12
    assert len(yard.heard[-1]) < yard.max_bytes


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([NamedBox("car", (0.0, 0.0, WIDTH + 1.0, HEIGHT))], "within the picture"),
        ([NamedBox("bus", (0.0, 0.0, 9.0, 9.0))], "unknown class"),
        ([CAR] * (TASK.max_boxes + 1), "expected at most 3"),
    ],
)
def test_what_is_refused_on_the_device_is_told_in_its_words(boxes: list[NamedBox], said: str, yard: Yard) -> None:
    yard.device.see(1)
    there = yard.studio()
    there.state()
    with pytest.raises(FeedbackRefused, match=said):
        there.label_boxes("front", 1, boxes)
    assert yard.device.learned() == []


def test_what_a_device_that_was_away_did_not_answer_is_not_done_when_it_is_back(yard: Yard) -> None:
    yard.session.clean = False  # the broker keeps what comes meanwhile
    yard.device.see(1)
    there = yard.studio()
    there.state()
    there.close()
    hasty = yard.studio(answer_s=0.05)
    hasty.session = there.session
    yard.session.stop()
    with pytest.raises(FeedbackRefused, match="doesn't answer"):
        hasty.label_boxes("front", 1, [CAR])
    hasty.close()
    yard.session.start()
    assert yard.studio().state()["num_waiting"] == 1, "answered after whatever came before"
    assert yard.device.learned() == []


def test_nobody_else_is_answered_or_believed(yard: Yard) -> None:
    yard.device.see(1)
    stranger = yard.studio(Signer(Ed25519PrivateKey.generate()), answer_s=0.05)
    with pytest.raises(FeedbackRefused, match=r"doesn't answer; it answers where .* --remote-operator"):
        stranger.state()
    assert "another key than that of --remote-operator" in yard.refused[-1]
    for payload in (b"", b"{}", b"\x02" * 90, b"\x03" * 200, b"\xff" * (MAX_QUESTION_BYTES * 9)):
        yard.broker.session("x", on_message=lambda *_: None).start()
        yard.session.publish(TO_DEVICE, payload)
    assert not [payload for payload in yard.heard if payload[:1] == b"\x03" and unseals(payload)]
    signed = yard.operator.seal(TO_DEVICE, b'{"id": 1, "act": "label", "camera": "front", "frame": 1, "class": "car"}')
    yard.session.publish(topic_of("yard", "feedback", "cam-2"), signed)
    yard.session.publish(TO_DEVICE, yard.operator.seal(topic_of("yard", "feedback", "cam-2"), b"{}"))
    assert "signature doesn't hold on this topic" in yard.refused[-1]
    for rubbish in (
        b"{",
        b'{"id": 1, "act": "format"}',
        b'{"id": -1, "act": "state"}',
        b"x" * (MAX_QUESTION_BYTES + 1),
    ):
        yard.session.publish(TO_DEVICE, yard.operator.seal(TO_DEVICE, rubbish))
        assert "a question to the studio" in yard.refused[-1]
    assert yard.device.learned() == []
    assert yard.studio().state()["num_waiting"] == 1


def unseals(payload: bytes) -> bool:
    try:
        return bool(unseal(FROM_DEVICE, payload))
    except Exception:
        return False


def test_a_recorded_label_teaches_nothing_again_not_even_after_a_restart(yard: Yard) -> None:
    yard.device.see(1)
    there = yard.studio()
    there.state()
    there.label_boxes("front", 1, [CAR])
    recorded = [payload for payload in yard.heard if not unseals(payload)][-1]
    there.undo()
    yard.session.publish(TO_DEVICE, recorded)
    there.state()  # answered after it, so it was dealt with
    assert yard.device.learned() == []
    yard.shared.close()
    yard.shared = yard.share()
    yard.session.publish(TO_DEVICE, recorded)
    yard.studio().state()
    assert yard.device.learned() == []
    answers = [decode_answer(unseal(FROM_DEVICE, payload).frame) for payload in yard.heard if unseals(payload)]
    assert any("was restarted since this frame was shown" in one.error for one in answers)


def test_a_recorded_question_brings_no_picture_after_a_restart(yard: Yard) -> None:
    yard.device.see(1)
    there = yard.studio()
    there.state()
    assert there.frozen("front", 1)
    recorded = [payload for payload in yard.heard if not unseals(payload)][-1]
    yard.shared.close()
    yard.shared = yard.share()
    yard.heard.clear()
    yard.session.publish(TO_DEVICE, recorded)
    yard.studio().state()
    answers = [decode_answer(unseal(FROM_DEVICE, payload).frame) for payload in yard.heard if unseals(payload)]
    assert [one.picture for one in answers] == [b"", b""]


@pytest.mark.parametrize("held", ["", "ab" * 31, "nonsense"])
def test_a_remembered_key_that_is_none_is_told_at_the_start(held: str, yard: Yard) -> None:
    (yard.folder / "known").mkdir()
    (yard.folder / "known" / "cam-1.key").write_text(held)
    with pytest.raises(SettingsError, match=r"cam-1\.key: expected a device's key; remove it"):
        yard.studio()


def test_who_poses_as_the_device_is_not_believed(yard: Yard) -> None:
    there = yard.studio()
    there.state()
    impostor = Signer(Ed25519PrivateKey.generate())
    yard.shared.close()
    yard.own = impostor
    yard.shared = yard.share()
    there._answer_s = 0.2
    for find in (lambda: there, lambda: yard.studio(answer_s=0.2)):  # the first key is remembered over a restart
        with pytest.raises(FeedbackRefused, match="isn't believed: signed with another key than the one in"):
            find().state()


def test_an_answer_that_nobody_asked_for_is_no_introduction(yard: Yard) -> None:
    there = yard.studio(answer_s=5.0)
    forged = Signer(Ed25519PrivateKey.generate())
    for frame in (b"", b"\x80", b"\x82\xa2id\x01\xa7session\xa0"):
        yard.session.publish(FROM_DEVICE, forged.seal(FROM_DEVICE, frame))
    assert there.state()["client"] == "cam-1"


def test_a_flood_of_questions_costs_a_few_answers(yard: Yard) -> None:
    for number in range(500):
        yard.session.publish(TO_DEVICE, yard.operator.seal(TO_DEVICE, b'{"id": %d, "act": "state"}' % number))
    yard.now = 1e6
    yard.studio().state()
    assert len([payload for payload in yard.heard if unseals(payload)]) <= QUESTIONS_AT_ONCE + 1


def test_pictures_are_made_as_small_as_the_broker_takes(yard: Yard) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1080, 1920, 3), dtype=np.uint8)
    picture = Picture("front", 1, pixels, 0.0)
    yard.device.studio.watch(Shown(picture, Detector(TASK).inputs(picture), None))
    there = yard.studio()
    there.state()
    sizes = []
    for yard.max_bytes in (1 << 20, 1 << 16, 1 << 14, 2100):
        found = there.frozen("front", 1)
        sizes.append(0 if found is None else len(found))
    assert sizes[0] <= 160 * 1024
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0  # it doesn't fit; nobody waits for it in vain


def test_how_an_operators_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(32))
    path = tmp_path / "operator.key"
    path.write_text(key.hex() + "\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert operator_key(key.hex()) == operator_key(str(path)) == operator_key("~/operator.key") == key
    path.write_bytes(b"\xef\xbb\xbf" + key.hex().encode() + b"\r\n")  # as Notepad writes it
    assert operator_key(str(path)) == key
    for text in ("", "abc", key.hex()[:-2], str(tmp_path), str(tmp_path / "none"), "zz" * 32, "zz" * 200):
        with pytest.raises(SettingsError, match="64 hexadecimal digits"):
            operator_key(text)


class Fetched(threading.Thread):
    """Asks a page while the test's thread pumps the fleet."""

    def __init__(self, url: str, body: dict[str, Any] | None = None) -> None:
        super().__init__(daemon=True)
        self.url, self.body = url, body
        self.status, self.data = 0, b""
        self.start()

    def run(self) -> None:
        origin = self.url.split("/api")[0]
        data = None if self.body is None else json.dumps(self.body).encode()
        request = urllib.request.Request(self.url, data, {"Origin": origin})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                self.status, self.data = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                self.status, self.data = error.code, error.read()


@pytest.mark.usefixtures("served_here")
@pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto on this machine")
def test_the_command_over_a_real_broker(tmp_path: Path) -> None:
    task = TaskSpec(3, 32, ("car", "bike"), generator_width=1)
    with mosquitto(tmp_path, "allow_anonymous true") as port:
        world = _over(port)(tmp_path, num_clients=1, num_rounds=1, task=task)
        opener = source_opener([film(tmp_path / "film")], tmp_path, learning=LearningSettings(min_samples=2))
        client = world.start_client("cam-1", open_source=opener)
        studio = Studio(client.known, client.learn, 60.0, time.monotonic)
        client.watchers.append(studio.watch)
        words = ("--broker", f"mqtt://127.0.0.1:{port}", "--client-id", "cam-1", "--data-dir", tmp_path / "operator")
        command = [sys.executable, "-m", "replayfleet.edge_client.cli", "studio", *words, "--studio", "127.0.0.1:0"]
        log = tmp_path / "studio.log"
        code = "from replayfleet.edge_client.cli import main; main()"
        command = [sys.executable, "-c", code, *map(str, command[3:])]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        shared = None
        try:
            world.until(lambda: "http://" in log.read_text() or process.poll() is not None)
            text = log.read_text()
            key = text.split("--remote-operator: ")[1].split()[0]
            url = "http://" + text.split("http://")[1].split()[0].rstrip("/")
            second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert second.returncode == 2
            assert "is in use: another process runs there" in second.stderr
            refused = fetched(world, f"{url}/api/state")
            assert refused.status == 503
            assert f"--remote-operator {key}" in refused.data.decode()
            shared = client.share(studio, operator_key(key))
            world.until(lambda: len(studio.state()["waiting"]) > 1)
            state = json.loads(fetched(world, f"{url}/api/state").data)
            frame = {name: state["waiting"][0][name] for name in ("camera", "frame")}
            picture = fetched(world, f"{url}/frame?camera={frame['camera']}&frame={frame['frame']}")
            assert picture.data[:3] == b"\xff\xd8\xff"
            done = fetched(world, f"{url}/api/label", {**frame, "class": "car"})
            assert (done.status, json.loads(done.data)) == (200, {"said": "learned: car"})
            labels = client.known().labels
            assert labels.num_samples == 1
        finally:
            process.terminate()
            if shared is not None:
                shared.close()
            world.close()
            process.wait(60)


def fetched(world: World, url: str, body: dict[str, Any] | None = None) -> Fetched:
    asked = Fetched(url, body)
    world.until(lambda: not asked.is_alive())
    return asked


def _over(port: int) -> Callable[..., World]:
    class Real(World):
        def _connect(self, client_id: str, on_message: OnMessage, will: Will | None) -> Session:
            return Connector(TlsSettings(), None, insecure=True).to(f"mqtt://127.0.0.1:{port}", b"secret")(
                client_id, on_message, will
            )

    return Real
