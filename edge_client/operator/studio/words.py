"""What the studio's page and a device say to each other over MQTT: a question, and its answer, both signed.

Questions go to the client's ``feedback`` topic, answers come on its ``studio`` topic. They are JSON and MessagePack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from replayfleet.edge_client.operator.operator_desk import BoxBody
from replayfleet.federation.errors import UNREADABLE, MalformedMessage

MAX_QUESTION_BYTES = 64 * 1024
MAX_PICTURE_BYTES = 160 * 1024
MAX_STATE_BYTES = 256 * 1024
MAX_ANSWER_BYTES = 512 * 1024

Act = Literal["state", "frame", "newest", "label", "boxes", "skip", "undo"]


class Question(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What somebody at the page wants.

    Attributes:
        id: drawn anew for each; the answer has it too.
        act: what is wanted.
        session: of the device, as its last answer named it: a label that was recorded reaches no later one.
        camera: whose frame.
        frame: its number.
        class_name: what it shows, of ``label``.
        boxes: what is to be seen, of ``boxes``.
    """

    id: Annotated[int, Meta(ge=0, lt=1 << 53)]
    act: Act
    session: Annotated[str, Meta(max_length=32)] = ""
    camera: Annotated[str, Meta(max_length=256)] = ""
    frame: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0
    class_name: Annotated[str, Meta(max_length=256)] = msgspec.field(name="class", default="")
    boxes: Annotated[tuple[BoxBody, ...], Meta(max_length=1024)] = ()


class Answer(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a device says to it.

    Attributes:
        id: of the question.
        session: of the device's process.
        error: why nothing was done; empty if it was.
        said: what was taken back.
        state: of ``state``, the page's JSON.
        picture: of ``frame`` and ``newest``, a JPEG; empty if it is gone.
    """

    id: Annotated[int, Meta(ge=0, lt=1 << 53)]
    session: Annotated[str, Meta(max_length=32)]
    error: Annotated[str, Meta(max_length=1000)] = ""
    said: Annotated[str, Meta(max_length=300)] = ""
    state: Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)] = b""
    picture: Annotated[bytes, Meta(max_length=MAX_PICTURE_BYTES)] = b""


_question, _answer = msgspec.json.Decoder(Question), msgspec.msgpack.Decoder(Answer)
T = TypeVar("T")


def decode_question(data: bytes) -> Question:
    """Return a question that came.

    Raises:
        MalformedMessage: It is none, or too large.
    """
    return _read(_question.decode, data, MAX_QUESTION_BYTES)


def decode_answer(data: bytes) -> Answer:
    """Return an answer that came.

    Raises:
        MalformedMessage: It is none, or too large.
    """
    return _read(_answer.decode, data, MAX_ANSWER_BYTES)


def _read(decode: Callable[[bytes], T], data: bytes, at_most: int) -> T:
    if len(data) > at_most:
        raise MalformedMessage(f"{len(data)} bytes, expected at most {at_most}")
    try:
        return decode(data)
    except UNREADABLE as error:
        raise MalformedMessage(f"not usable: {str(error).replace('`', '')}") from error
