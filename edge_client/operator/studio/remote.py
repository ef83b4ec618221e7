"""The operator's end of the studio over MQTT: asks a device what the page wants, and waits for its answer.

The device's key is remembered at its first answer, as SSH does, and no other is believed from then on.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.edge_client.learning.labels.operators_word import FeedbackRefused, NamedBox
from replayfleet.edge_client.operator.operator_desk import BoxBody
from replayfleet.edge_client.operator.studio.sharing import OneVoice, opened
from replayfleet.edge_client.operator.studio.words import Act, Answer, Question, decode_answer, decode_question
from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import UNREADABLE, MalformedMessage, SettingsError
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.federation.wire.transport.interfaces import Connect, Session
from replayfleet.federation.wire.transport.seal import Sealed, Signer, Voices, unseal

ANSWER_S = 6.0
_KEY_BYTES = 32
_JPEG = b"\xff\xd8\xff"

log = EventLogger(__name__)


class RemoteStudio:
    """What ``Studio`` is on the device, from afar. Safe across threads; each call waits for the device.

    Args:
        fleet: its name.
        client: whose pictures.
        connect: makes the session.
        own: signs as the operator; the device was started with its public key.
        known: folder in which devices' keys are remembered.
        answer_s: how long an answer is waited for.
    """

    def __init__(  # the last has a default
        self, fleet: str, client: str, connect: Connect, own: Signer, known: Path, answer_s: float = ANSWER_S
    ) -> None:
        self._client = client
        self._own = own
        self._answer_s = answer_s
        self._to, self._from = topic_of(fleet, "feedback", client), topic_of(fleet, "studio", client)
        self._pin = known / f"{client}.key"
        self._voices: Voices | None = None
        self._waiting: dict[int, queue.Queue[Answer]] = {}
        self._changing = threading.Lock()
        self.session = ""
        self._newest: dict[str, int] = {}
        self._problem = ""
        key = _pinned(self._pin)
        if key is not None:
            self._believe(key)
        self._mqtt: Session = connect(f"{fleet}-studio-{client}", self._receive, None)
        self._mqtt.subscribe((self._from,))
        self._mqtt.start()

    def close(self) -> None:
        """Say goodbye. Idempotent."""
        self._mqtt.stop()

    def state(self) -> dict[str, Any]:
        """What the page shows beside pictures.

        Raises:
            FeedbackRefused: The device doesn't answer.
        """
        answer = self._ask("state")
        try:
            found = msgspec.json.decode(answer.state, type=dict[str, Any])
            self._newest = {str(one["name"]): int(one["frame"]) for one in found["cameras"]}
        except (*UNREADABLE, KeyError, TypeError, OverflowError) as error:
            raise FeedbackRefused(f"device {self._client!r} says what can't be read; update it, or this") from error
        self.session = answer.session
        return {**found, "session": self.session, "remote": True}

    def label(self, camera: str, frame_id: int, class_name: str) -> None:
        """Have the device learn what the object of a waiting frame is; raises FeedbackRefused."""
        self._ask("label", camera=camera, frame=frame_id, class_name=class_name)

    def label_boxes(self, camera: str, frame_id: int, boxes: Sequence[NamedBox]) -> None:
        """Have the device learn what is to be seen in a waiting frame; raises FeedbackRefused."""
        self._ask(
            "boxes", camera=camera, frame=frame_id, boxes=tuple(BoxBody(one.class_name, one.corners) for one in boxes)
        )

    def skip(self, camera: str, frame_id: int) -> None:
        """Nobody wants to label this frame; raises FeedbackRefused."""
        self._ask("skip", camera=camera, frame=frame_id)

    def undo(self) -> str:
        """Have the newest label taken back; returns what it said. Raises FeedbackRefused."""
        return self._ask("undo").said

    def frozen(self, camera: str, frame_id: int) -> bytes | None:
        """Return a waiting frame as JPEG; None if it is gone. Raises FeedbackRefused."""
        return self._picture("frame", camera, frame_id)

    def newest(self, camera: str) -> tuple[int, Callable[[], bytes]] | None:
        """Return a camera's newest frame number that we heard of, and what brings its JPEG."""
        number = self._newest.get(camera)
        return None if number is None else (number, lambda: self._picture("newest", camera, number) or b"")

    def _picture(self, act: Act, camera: str, frame_id: int) -> bytes | None:
        picture = self._ask(act, camera=camera, frame=frame_id).picture
        return picture if picture.startswith(_JPEG) else None

    def _ask(self, act: Act, **about: Any) -> Answer:
        """Ask, and wait for the answer.

        Raises:
            FeedbackRefused: There is none, or the device refuses.
        """
        number = secrets.randbits(53)
        question = msgspec.json.encode(Question(number, act, self.session, **about))
        try:
            decode_question(question)
        except MalformedMessage as error:  # the device would not answer that
            raise FeedbackRefused(str(error)) from error
        box: queue.Queue[Answer] = queue.Queue(1)
        self._waiting[number] = box
        try:
            if not self._mqtt.connected:
                raise FeedbackRefused(f"broker: {self._mqtt.problem or self._mqtt.state}")
            with self._changing:  # in the order of their times
                # nothing is done late that was called failed
                self._mqtt.publish(self._to, self._own.seal(self._to, question), expires_s=math.ceil(self._answer_s))
            answer = box.get(timeout=self._answer_s)
        except queue.Empty:
            raise FeedbackRefused(self._silence()) from None
        except ValueError as error:  # larger than the broker takes
            raise FeedbackRefused(f"broker: {error}") from error
        finally:
            self._waiting.pop(number, None)
        if answer.error:
            raise FeedbackRefused(answer.error)
        return answer

    def _silence(self) -> str:
        return self._problem or (
            f"device {self._client!r} doesn't answer; it answers where `edge-client start --remote-operator "
            f"{self._own.public_key.hex()}` runs"
        )

    def _receive(self, topic: str, payload: bytes) -> None:
        """Called on a network thread."""
        try:
            if self._voices is None:
                self._introduced(unseal(topic, payload))
            assert self._voices is not None
            frame = opened(self._voices, topic, payload, 0.0)
            if frame is None:
                return
            answer = decode_answer(frame)
        except MalformedMessage as error:
            self._problem = f"what comes as {self._client!r} isn't believed: {error}"
            log.warning("answer not taken", reason=error)
            return
        self._problem = ""
        box = self._waiting.get(answer.id)
        if box is not None and box.empty():
            box.put_nowait(answer)

    def _introduced(self, sealed: Sealed) -> None:
        """Remember the key of the first who answers a question of ours."""
        if decode_answer(sealed.frame).id not in self._waiting:
            raise MalformedMessage("nobody asked")
        self._believe(sealed.key)
        try:
            self._pin.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(self._pin, sealed.key.hex().encode() + b"\n")
        except OSError as error:
            log.warning("device's key not remembered", reason=error)
        else:
            log.info("device's key is remembered", client=self._client, file=self._pin)

    def _believe(self, key: bytes) -> None:
        whose = f"the one in {self._pin}; if the device was set up anew, remove that file"
        self._voices = Voices(self._own, OneVoice(key, "studio", whose))


def _pinned(path: Path) -> bytes | None:
    """Return a device's key, if one is remembered; SettingsError if it can't be read."""
    try:
        if not path.is_file():
            return None
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
        if len(key) != _KEY_BYTES:
            raise ValueError(f"{len(key)} bytes")
        return key
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: expected a device's key; remove it, and the next answer's is taken") from error
