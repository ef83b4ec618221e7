"""The device's end of the studio over MQTT: whom it answers, how often, and how large pictures may be.

Nobody is answered but who signs with the one key that ``--remote-operator`` names. Each question is answered once, by a
thread of its own; more than a few that wait are passed over, and the page asks again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

import msgspec

from replayfleet.edge_client.learning.labels.operators_word import FeedbackRefused, NamedBox
from replayfleet.edge_client.operator.studio.studio import Studio
from replayfleet.edge_client.operator.studio.words import (
    MAX_PICTURE_BYTES,
    MAX_STATE_BYTES,
    Answer,
    Question,
    decode_question,
)
from replayfleet.federation.errors import MalformedMessage, SettingsError
from replayfleet.federation.paths import given_path
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.quotas import TokenBucket
from replayfleet.federation.wire.protocol.codec import is_block
from replayfleet.federation.wire.protocol.limits import check
from replayfleet.federation.wire.protocol.topics import Address, parse_topic
from replayfleet.federation.wire.transport.seal import Kind, Sealed, Signer, Voices

MAX_WAITING = 16
QUESTIONS_PER_S, QUESTIONS_AT_ONCE = 20.0, 40.0
LONGEST_KEY_FILE = 4096
_ROOM_FOR_THE_REST = 2048

log = EventLogger(__name__)


def operator_key(text: str) -> bytes:
    """Return the public key, 32 bytes, that 64 hexadecimal digits or a file with them name.

    Raises:
        SettingsError: They don't.
    """
    words = text
    with contextlib.suppress(OSError, ValueError):
        if len(text) != 64 and (path := given_path(text)).is_file():
            with path.open(encoding="utf-8-sig") as file:
                words = file.read(LONGEST_KEY_FILE).strip()
    try:
        key = bytes.fromhex(words)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise SettingsError(
            f"remote operator {text[:80]!r}: expected 64 hexadecimal digits, the key that `edge-client studio` shows, "
            "or a file with them"
        )
    return key


class OneVoice:
    """Implements ``Trust``: one key, on one channel."""

    def __init__(self, key: bytes, channel: str, whose: str) -> None:
        self._key = key
        self._channel = channel
        self._whose = whose

    def takes(self, address: Address, sealed: Sealed, now: float) -> bool:
        check(address.channel == self._channel and sealed.kind is Kind.SAID, "said where nobody asks")
        check(sealed.key == self._key, f"signed with another key than {self._whose}")
        return True


def opened(voices: Voices, topic: str, payload: bytes, now: float) -> bytes | None:
    """Return what was signed; None for what was heard before.

    Raises:
        MalformedMessage: It isn't signed, or not by whom it should.
    """
    check(not is_block(payload), "a block, which nobody signs")
    return voices.open(parse_topic(topic), topic, payload, now)


class SharedStudio:
    """Answers one operator's questions about one device.

    Args:
        studio: knows frames and takes labels.
        key: the operator's public key.
        own: signs as the device.
        topic: the client's ``feedback`` topic.
        answer: takes a frame that is to be said on the client's ``studio`` topic; may be called on any thread.
        max_bytes: of a message at this broker.
    """

    def __init__(  # six ends of one wire
        self,
        studio: Studio,
        key: bytes,
        own: Signer,
        topic: str,
        answer: Callable[[bytes], None],
        max_bytes: Callable[[], int],
    ) -> None:
        self._studio = studio
        self._voices = Voices(own, OneVoice(key, "feedback", "that of --remote-operator"))
        self._topic = topic
        self._answer = answer
        self._max_bytes = max_bytes
        self._bucket = TokenBucket(QUESTIONS_PER_S, QUESTIONS_AT_ONCE)
        self._waiting: queue.Queue[Question | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="shared studio", daemon=True)
        self._thread.start()

    def hear(self, payload: bytes, now: float) -> None:
        """Take what came on the topic; called on the client's loop, so it only enqueues.

        Raises:
            FeedbackRefused: It is no question of our operator's.
        """
        try:
            frame = opened(self._voices, self._topic, payload, now)
            if frame is None or not self._bucket.take(1, now):
                return
            question = decode_question(frame)
        except MalformedMessage as error:
            raise FeedbackRefused(f"a question to the studio: {error}") from error
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(question)

    def close(self) -> None:
        """Answer no more. Idempotent."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (question := self._waiting.get()) is not None:
            try:
                found = self._found(question)
            except FeedbackRefused as refused:
                found = Answer(question.id, self._studio.session, error=str(refused)[:1000])
            except Exception:  # root of a thread
                log.exception("studio's question failed", act=question.act)
                found = Answer(question.id, self._studio.session, error="this failed on the device; its log says why")
            self._answer(msgspec.msgpack.encode(found))

    def _found(self, question: Question) -> Answer:
        studio, said = self._studio, ""
        if question.act != "state" and question.session != self._studio.session:  # a recorded one may be said again
            raise FeedbackRefused("the device was restarted since this frame was shown; nothing was learned of it")
        match question.act:
            case "state":
                return Answer(question.id, self._studio.session, state=self._state())
            case "frame":
                picture = studio.frozen(question.camera, question.frame, self._room(MAX_PICTURE_BYTES))
                return Answer(question.id, self._studio.session, picture=picture or b"")
            case "newest":
                newest = studio.newest(question.camera, self._room(MAX_PICTURE_BYTES))
                return Answer(question.id, self._studio.session, picture=b"" if newest is None else newest[1]())
            case "label":
                studio.label(question.camera, question.frame, question.class_name)
            case "boxes":
                boxes = [NamedBox(one.class_name, one.box) for one in question.boxes]
                studio.label_boxes(question.camera, question.frame, boxes)
            case "skip":
                studio.skip(question.camera, question.frame)
            case "undo":
                said = studio.undo()
        log.info("remote operator", act=question.act, camera=question.camera, frame=question.frame)
        return Answer(question.id, self._studio.session, said=said[:300])

    def _state(self) -> bytes:
        """Return the page's JSON with as many waiting frames as there is room for: each may have hundreds of boxes."""
        state = self._studio.state()
        while len(encoded := msgspec.json.encode(state)) > self._room(MAX_STATE_BYTES) and state["waiting"]:
            state["waiting"].pop()
        return encoded

    def _room(self, at_most: int) -> int:
        """Bytes that a picture or the state may have."""
        return min(at_most, self._max_bytes() - _ROOM_FOR_THE_REST)
