"""Signed messages: who said it, that it is new, and that it was said on this topic. Blocks go as they are.

A sealed frame is ``0x03, protocol version, kind, speaker (8 bytes), time (unsigned 64 bits), public key (32 bytes),
Ed25519 signature (64 bytes), frame of a message``; numbers are big endian. The signature binds topic, head and frame.
Blocks are bound by the digests in their signed offer.
"""

from __future__ import annotations

import contextlib
import enum
import secrets
import struct
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.paths import read_regular
from replayfleet.federation.wire.protocol.codec import is_block
from replayfleet.federation.wire.protocol.limits import check
from replayfleet.federation.wire.protocol.messages import PROTOCOL_VERSION
from replayfleet.federation.wire.protocol.topics import Address

SEALED = 3
_HEAD = struct.Struct("!BBB8sQ32s")
_SIGNATURE_BYTES = 64
OVERHEAD_BYTES = _HEAD.size + _SIGNATURE_BYTES
"""What a seal adds to a frame."""

KEEP_FLOOR_EVERY_US = 60_000_000
"""How often a signer writes down how late it is, so that a clock that is put back makes nothing old."""
CLOCKS_APART_US = 120_000_000
"""Two aggregators' clocks may differ so much."""
MAX_TIME_US = 190_000_000_000_000_000
MAX_SPEAKERS = 8
"""Processes of one member whose last word on a topic is remembered."""
MAX_REMEMBERED = 16_384
"""Topics on which somebody spoke, five of each member; the longest silent is forgotten. Some 700 bytes each."""


class Kind(enum.IntEnum):
    """How a message came to be sent."""

    SAID = 0
    WILL = 1
    """By the broker, in the name of a process that vanished: made when that began, and believed once."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """A message whose signature holds.

    Attributes:
        key: public key of who signed, 32 bytes.
        speaker: names the process that signed.
        time_us: microseconds since 1970 by the signer's clock, rising within one process.
        kind: how it came to be sent.
        frame: of the message.
    """

    key: bytes
    speaker: bytes
    time_us: int
    kind: Kind
    frame: bytes


class Trust(Protocol):
    """Whose word one end of the fleet takes."""

    def takes(self, address: Address, sealed: Sealed, now: float) -> bool:
        """Whether this signer may speak on this topic, now.

        Raises:
            MalformedMessage: It may not; says why.
        """


class Signer:
    """Signs in the name of one member.

    Args:
        key: private.
        floor: file that keeps, over restarts, how late it is at least; None for none.
        clock_us: microseconds since 1970.

    Attributes:
        speaker: names this process.
    """

    def __init__(
        self,
        key: Ed25519PrivateKey,
        floor: Path | None = None,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._key = key
        self._floor = floor
        self._clock_us = clock_us
        self._last_us = self._kept_us = _read(floor)
        if self._kept_us and clock_us() < self._kept_us:  # put back; what was signed since that writing isn't known
            self._last_us += KEEP_FLOOR_EVERY_US
        self.public_key = key.public_key().public_bytes_raw()
        self.speaker = secrets.token_bytes(8)

    def now_us(self) -> int:
        """Return the time, later than any that this member ever signed, wherever the clock was put."""
        self._last_us = max(self._clock_us(), self._last_us + 1)
        if self._floor is not None and self._last_us - self._kept_us >= KEEP_FLOOR_EVERY_US:
            self._kept_us = self._last_us
            with contextlib.suppress(OSError):  # a full disk stops nobody from speaking
                text = b"%d" % self._last_us
                write_atomic(self._floor, b"%b %d\n" % (text, zlib.crc32(text)), private=True)
        return self._last_us

    def outlive(self, time_us: int) -> None:
        """Be later than what this member turns out to have signed; one that was restored from a copy has forgotten."""
        self._last_us = max(self._last_us, time_us)

    def seal(self, topic: str, frame: bytes, kind: Kind = Kind.SAID) -> bytes:
        """Return a message's frame, signed for one topic."""
        head = _HEAD.pack(SEALED, PROTOCOL_VERSION, kind, self.speaker, self.now_us(), self.public_key)
        return b"".join((head, self._key.sign(_signed(topic, head, frame)), frame))


def unseal(topic: str, payload: bytes) -> Sealed:
    """Return what was signed for this topic.

    Raises:
        MalformedMessage: Not signed, for another topic, or the signature doesn't hold.
    """
    check(payload[:1] == bytes([SEALED]), "it isn't signed")
    check(len(payload) > OVERHEAD_BYTES, f"sealed frame of {len(payload)} bytes is shorter than its head")
    _, version, kind, speaker, time_us, key = _HEAD.unpack_from(payload)
    check(version == PROTOCOL_VERSION, f"protocol version {version}, this build speaks {PROTOCOL_VERSION}")
    check(time_us < MAX_TIME_US, "its time is beyond the year 8000")
    check(kind in set(Kind), f"kind {kind} of a sealed frame is unknown")
    head, frame = payload[: _HEAD.size], payload[OVERHEAD_BYTES:]
    try:
        signature = payload[_HEAD.size : OVERHEAD_BYTES]
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _signed(topic, head, frame))
    except InvalidSignature:
        raise MalformedMessage("its signature doesn't hold on this topic") from None
    return Sealed(key, speaker, time_us, Kind(kind), frame)


class Voices:
    """Seals what a member says, and opens what others sealed: each message once, in the order in which it was said.

    Args:
        own: who we are.
        trust: whose word is taken.
    """

    def __init__(self, own: Signer, trust: Trust) -> None:
        self._own = own
        self._trust = trust
        self._heard: OrderedDict[tuple[bytes, str], OrderedDict[bytes, int]] = OrderedDict()

    def seal(self, topic: str, frame: bytes) -> bytes:
        """Return a frame as it travels on one topic."""
        return frame if is_block(frame) else self._own.seal(topic, frame)

    def open(self, address: Address, topic: str, payload: bytes, now: float) -> bytes | None:
        """Return the frame of a message or block; None for our own echo, and for what was heard before.

        Raises:
            MalformedMessage: Nobody whose word is taken here said so.
        """
        if is_block(payload):
            return payload
        sealed = unseal(topic, payload)
        if (sealed.key, sealed.speaker) == (self._own.public_key, self._own.speaker):
            return None
        if not self._trust.takes(address, sealed, now) or not self._is_new(topic, sealed):
            return None
        return sealed.frame

    def _is_new(self, topic: str, sealed: Sealed) -> bool:
        """Whether its speaker said nothing later on this topic; a will may be late, but isn't said twice."""
        place = (sealed.key, f"will {topic}" if sealed.kind is Kind.WILL else topic)
        speakers = self._heard.setdefault(place, OrderedDict())
        self._heard.move_to_end(place)
        if sealed.time_us <= speakers.get(sealed.speaker, -1):
            return False
        speakers[sealed.speaker] = sealed.time_us
        speakers.move_to_end(sealed.speaker)
        if len(speakers) > MAX_SPEAKERS:
            speakers.popitem(last=False)
        if len(self._heard) > MAX_REMEMBERED:
            self._heard.popitem(last=False)
        return True


def _signed(topic: str, head: bytes, frame: bytes) -> bytes:
    return b"".join((b"replayfleet seal 1\0", topic.encode(), b"\0", head, frame))


def _read(floor: Path | None) -> int:
    try:
        text, *check_value = [b"0"] if floor is None else read_regular(floor)[:32].split()
        time_us = int(text)
    except (OSError, ValueError):
        return 0
    if check_value not in ([], [b"%d" % zlib.crc32(text)]):  # earlier versions wrote none
        return 0
    return time_us if 0 <= time_us < MAX_TIME_US else 0  # damaged
