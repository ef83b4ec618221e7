"""A camera's newest picture, small, from a device that allows it to the aggregator's console; signed like messages."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from replayfleet.federation.errors import UNREADABLE, MalformedMessage

MAX_WIDTH = 240
"""Pixels."""
MAX_PICTURE_BYTES = 24 * 1024
MAX_BYTES = MAX_PICTURE_BYTES + 1024
JPEG = b"\xff\xd8\xff"


class Thumbnail(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One picture.

    Attributes:
        camera: whose.
        frame: its number.
        picture: JPEG, with what was answered drawn in.
    """

    camera: Annotated[str, Meta(min_length=1, max_length=64)]
    frame: Annotated[int, Meta(ge=0, lt=1 << 62)]
    picture: Annotated[bytes, Meta(max_length=MAX_PICTURE_BYTES)]


_decoder = msgspec.msgpack.Decoder(Thumbnail)


def encode_thumbnail(thumbnail: Thumbnail) -> bytes:
    """Return a thumbnail as it travels, still unsigned."""
    return msgspec.msgpack.encode(thumbnail)


def decode_thumbnail(data: bytes) -> Thumbnail:
    """Return a thumbnail that came.

    Raises:
        MalformedMessage: It is none, too large, or no JPEG.
    """
    if len(data) > MAX_BYTES:
        raise MalformedMessage(f"a thumbnail of {len(data)} bytes, expected at most {MAX_BYTES}")
    try:
        found = _decoder.decode(data)
    except UNREADABLE as error:
        raise MalformedMessage(f"a thumbnail that isn't usable: {str(error).replace('`', '')}") from error
    if not found.picture.startswith(JPEG):
        raise MalformedMessage("a thumbnail that is no JPEG")
    return found
