"""Seals: who said it, on which topic, and that it is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.messages import PROTOCOL_VERSION
from replayfleet.federation.wire.protocol.topics import parse_topic, topic_of
from replayfleet.federation.wire.transport import seal
from replayfleet.federation.wire.transport.seal import (
    KEEP_FLOOR_EVERY_US,
    MAX_TIME_US,
    OVERHEAD_BYTES,
    Kind,
    Signer,
    Voices,
    unseal,
)
from tests.support.voices import TakesAll

TOPIC = topic_of("yard", "control", "cam-1")
FRAME = b"\x01\x01a message"
BLOCK = b"\x02\x01a block"


def a_signer(*times: int) -> Signer:
    clock = iter(times or range(1, 1000))
    return Signer(Ed25519PrivateKey.generate(), clock_us=lambda: next(clock))


def heard(voices: Voices, payload: bytes, topic: str = TOPIC) -> bytes | None:
    return voices.open(parse_topic(topic), topic, payload, 0.0)


@pytest.fixture
def voices() -> Voices:
    return Voices(a_signer(), TakesAll())


def test_what_was_sealed_is_opened_with_the_name_of_who_did() -> None:
    signer = a_signer(7, 8)
    sealed = unseal(TOPIC, signer.seal(TOPIC, FRAME, Kind.WILL))
    assert (sealed.key, sealed.speaker, sealed.time_us) == (signer.public_key, signer.speaker, 7)
    assert (sealed.kind, sealed.frame) == (Kind.WILL, FRAME)
    assert len(signer.seal(TOPIC, FRAME)) == len(FRAME) + OVERHEAD_BYTES


def test_a_seal_of_one_topic_holds_on_no_other() -> None:
    with pytest.raises(MalformedMessage, match="doesn't hold on this topic"):
        unseal(topic_of("yard", "control", "cam-2"), a_signer().seal(TOPIC, FRAME))


@given(place=st.integers(0, OVERHEAD_BYTES + len(FRAME) - 1), bit=st.integers(0, 7))
def test_no_bit_can_be_changed(place: int, bit: int) -> None:
    payload = bytearray(a_signer().seal(TOPIC, FRAME))
    payload[place] ^= 1 << bit
    with pytest.raises(MalformedMessage):
        unseal(TOPIC, bytes(payload))


@given(st.binary(max_size=300))
def test_any_other_bytes_are_refused(data: bytes) -> None:
    for payload in (data, b"\x03\x01" + data, b"\x03\x01\x00" + data):
        with pytest.raises(MalformedMessage):
            unseal(TOPIC, payload)


def test_a_message_is_heard_once_and_in_order(voices: Voices) -> None:
    cam = a_signer()
    first, second = (cam.seal(TOPIC, FRAME + bytes([number])) for number in range(2))
    assert heard(voices, second) == FRAME + b"\x01"
    assert heard(voices, first) is None, "said before what was heard"
    assert heard(voices, second) is None, "heard before"
    other = topic_of("yard", "state", "cam-1")
    assert heard(voices, cam.seal(other, FRAME), other) == FRAME


def test_a_will_comes_late_and_counts_once(voices: Voices) -> None:
    cam = a_signer()
    will = cam.seal(TOPIC, FRAME, Kind.WILL)
    assert heard(voices, cam.seal(TOPIC, FRAME)) == FRAME
    assert heard(voices, will) == FRAME
    assert heard(voices, will) is None


def test_our_own_echo_is_passed_over_and_blocks_go_as_they_are() -> None:
    own = a_signer()
    voices = Voices(own, TakesAll())
    assert heard(voices, own.seal(TOPIC, FRAME)) is None
    assert (voices.seal(TOPIC, BLOCK), heard(voices, BLOCK)) == (BLOCK, BLOCK)
    assert voices.seal(TOPIC, FRAME) != FRAME


def test_a_message_that_nobody_signed_is_refused(voices: Voices) -> None:
    with pytest.raises(MalformedMessage, match="isn't signed"):
        heard(voices, FRAME)


def test_who_may_not_speak_isnt_heard(voices: Voices) -> None:
    class Nobody:
        def takes(self, *_: Any) -> bool:
            return False

    assert heard(Voices(a_signer(), Nobody()), a_signer().seal(TOPIC, FRAME)) is None


def test_time_goes_on_wherever_the_clock_is_put_also_over_restarts(tmp_path: Path) -> None:
    key, floor = Ed25519PrivateKey.generate(), tmp_path / "clock"
    clock = iter([10**12, 5, 10**9, 10**12 + KEEP_FLOOR_EVERY_US - 1])
    signer = Signer(key, floor, lambda: next(clock))
    assert [signer.now_us(), signer.now_us(), signer.now_us()] == [10**12, 10**12 + 1, 10**12 + 2]
    last = signer.now_us()
    written = floor.read_bytes()
    assert int(written.split()[0]) == 10**12, "written once a minute"
    assert Signer(key, floor, lambda: 7).now_us() > last
    floor.write_bytes(b"%d\n" % 10**12)
    assert Signer(key, floor, lambda: 7).now_us() > 10**12, "as earlier versions wrote it"
    for damaged in (b"damaged", b"9" * 23, b"-5", b"", bytes(20), b"9" + written[1:]):
        floor.write_bytes(damaged)
        assert Signer(key, floor, lambda: 7).now_us() == 7


def test_a_disk_that_takes_no_time_stops_nobody_from_speaking(tmp_path: Path) -> None:
    signer = Signer(Ed25519PrivateKey.generate(), tmp_path / "gone" / "clock", lambda: 10**12)
    assert unseal(TOPIC, signer.seal(TOPIC, FRAME)).time_us == 10**12


def test_what_is_remembered_of_speakers_is_bounded(voices: Voices) -> None:
    key = Ed25519PrivateKey.generate()
    for _ in range(50):
        said = Signer(key).seal(TOPIC, FRAME)
        assert heard(voices, said) == FRAME
        assert heard(voices, said) is None
    assert all(len(speakers) <= 8 for speakers in voices._heard.values())


def test_of_too_many_topics_the_longest_silent_one_is_forgotten(
    voices: Voices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayfleet.federation.wire.transport.seal.MAX_REMEMBERED", 2)
    cam = a_signer()
    topics = [topic_of("yard", channel, "cam-1") for channel in ("state", "control", "up")]
    said = [cam.seal(topic, FRAME) for topic in topics]
    for place in (0, 1):
        assert heard(voices, said[place], topics[place]) == FRAME
    assert heard(voices, said[0], topics[0]) is None, "which is no silence"
    assert heard(voices, said[2], topics[2]) == FRAME
    assert [heard(voices, said[place], topics[place]) for place in (0, 1)] == [None, FRAME]


def test_whoever_takes_the_name_of_a_process_makes_nobody_else_mute(voices: Voices) -> None:
    cam, thief = a_signer(1), a_signer(10**12)
    thief.speaker = cam.speaker
    assert heard(voices, thief.seal(TOPIC, FRAME)) == FRAME
    assert heard(voices, cam.seal(TOPIC, FRAME)) == FRAME


def test_a_time_that_no_calendar_has_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="beyond the year 8000"):
        unseal(TOPIC, a_signer(MAX_TIME_US).seal(TOPIC, FRAME))
    assert unseal(TOPIC, a_signer(MAX_TIME_US - 1).seal(TOPIC, FRAME)).frame == FRAME


def test_what_another_version_or_for_another_reason_was_signed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can sign such a thing; it must be no unexpected error of whoever hears it."""
    with pytest.raises(MalformedMessage, match="kind 2 of a sealed frame is unknown"):
        unseal(TOPIC, a_signer().seal(TOPIC, FRAME, 2))  # type: ignore[arg-type]
    with monkeypatch.context() as later:
        later.setattr(seal, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
        said = a_signer().seal(TOPIC, FRAME)
    with pytest.raises(MalformedMessage, match=f"protocol version {PROTOCOL_VERSION + 1}, this build speaks"):
        unseal(TOPIC, said)
