"""Frames: one type byte, one version byte, then msgpack (messages) or a header and raw bytes (blocks).

Messages travel in a third kind of frame, which carries who signed them: ``federation.wire.transport.seal``.

Frame of a message: ``0x01, version, msgpack``. Frame of a block: ``0x02, version, transfer id (16 bytes), index
(unsigned 32 bits, big endian), payload``. Sizes are checked before anything is decoded, meaning right after.
"""

from __future__ import annotations

import struct

import msgspec

from replayfleet.federation.errors import UNREADABLE, MalformedMessage
from replayfleet.federation.wire.protocol.limits import (
    MAX_BLOCK_BYTES,
    MAX_MESSAGE_BYTES,
    check,
    check_message,
)
from replayfleet.federation.wire.protocol.messages import PROTOCOL_VERSION, Block, Manifest, Message

_MESSAGE = 1
_BLOCK = 2
_HEAD = struct.Struct("!BB")
_BLOCK_HEAD = struct.Struct("!BB16sI")
_BLOCK_TYPE = bytes([_BLOCK])
_PREFIX = _HEAD.pack(_MESSAGE, PROTOCOL_VERSION)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message | Block) -> bytes:
    """Return the frame that travels.

    Raises:
        MalformedMessage: The message breaks a limit, so the other end would refuse it.
    """
    check_message(message)
    if isinstance(message, Block):
        head = _BLOCK_HEAD.pack(_BLOCK, PROTOCOL_VERSION, bytes.fromhex(message.transfer_id), message.index)
        return b"".join((head, message.payload))
    frame = _PREFIX + _encoder.encode(message)
    check(len(frame) <= MAX_MESSAGE_BYTES, f"message of {len(frame)} bytes, expected at most {MAX_MESSAGE_BYTES}")
    return frame


def decode(payload: bytes) -> Message | Block:
    """Return what a frame holds; a block's payload is a view of ``payload``, not a copy.

    Raises:
        MalformedMessage: Too short, too long, of another protocol version, not msgpack, not one of our messages, or
            outside the limits; the text says which.
    """
    check(len(payload) >= _HEAD.size, f"frame of {len(payload)} bytes is shorter than its head")
    frame_type, version = _HEAD.unpack_from(payload)
    check(frame_type in {_MESSAGE, _BLOCK}, f"frame type {frame_type} is unknown")
    check(version == PROTOCOL_VERSION, f"protocol version {version}, this build speaks {PROTOCOL_VERSION}")
    message = _decode_block(payload) if frame_type == _BLOCK else _decode_message(payload)
    check_message(message)
    return message


def is_block(payload: bytes) -> bool:
    """Whether a frame says that it is a block; nothing is decoded."""
    return payload[:1] == _BLOCK_TYPE


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest alone, for digests: equal manifests give equal bytes."""
    return _encoder.encode(manifest)


def _decode_block(payload: bytes) -> Block:
    size = len(payload) - _BLOCK_HEAD.size
    check(0 < size <= MAX_BLOCK_BYTES, f"block of {size} bytes, expected 1 to {MAX_BLOCK_BYTES}")
    _, _, transfer_id, index = _BLOCK_HEAD.unpack_from(payload)
    return Block(transfer_id.hex(), index, memoryview(payload)[_BLOCK_HEAD.size :])


def _decode_message(payload: bytes) -> Message:
    check(len(payload) <= MAX_MESSAGE_BYTES, f"message of {len(payload)} bytes, expected at most {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(memoryview(payload)[_HEAD.size :])
    except UNREADABLE as error:
        raise MalformedMessage(f"not a message of protocol version {PROTOCOL_VERSION}: {error}") from error
