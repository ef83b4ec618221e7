"""What the gate lets in, decided from an offer alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from replayfleet.aggregator.admission import Caps, Gate, what_next
from replayfleet.aggregator.rounds.machine import Decision, RoundRules, Rounds
from replayfleet.federation.errors import Reason, UploadRejected
from replayfleet.federation.service.artefact_codec import HEADER_ALLOWANCE_BYTES
from replayfleet.federation.wire.protocol.messages import BlobEntry, BundlePart, Manifest, Offer

LAYOUTS = {"task": {"w": torch.zeros(1000)}, "sub-generator/0": {"w": torch.zeros(10)}}
GATE = Gate("street", LAYOUTS.get, Caps(max_blobs=2, max_upload_bytes=100_000, max_clients=3))
BLOB = BlobEntry("task", "ab" * 32, 4000)
MANIFEST = Manifest("up", "street", "cam-1", 4, 1, (BLOB,))
PARTS = (BundlePart(BLOB.digest, 3000, "zstd"),)


def rounds(*accepted: str) -> Rounds:
    return Rounds(RoundRules(num_clients=3), 0.0, index=4, accepted=accepted)


def check(
    *, round_: Rounds | None = None, num_known: int = 1, known: bool = True, parts: Any = PARTS, **changes: Any
) -> None:
    offer = Offer("client", "0" * 32, replace(MANIFEST, **changes), parts, 1024, b"")
    GATE.check_offer("cam-1", offer, round_ or rounds("cam-2"), num_known, known=known)


def test_an_upload_of_a_known_client_for_the_open_round_is_taken() -> None:
    check()
    check(num_known=2, known=False)  # a stranger, while there is room
    check(num_known=3, known=True)
    check(parts=(BundlePart(BLOB.digest, 4000, "raw"),))
    check(parts=())


def test_as_much_as_the_caps_say_is_taken() -> None:
    most = HEADER_ALLOWANCE_BYTES + 4000
    caps = Caps(max_blobs=2, max_upload_bytes=2 * most)
    both = tuple(BlobEntry("task", digest * 32, most) for digest in ("ab", "cd"))
    offer = Offer("client", "0" * 32, replace(MANIFEST, blobs=both), (), 1024, b"")
    Gate("street", LAYOUTS.get, caps).check_offer("cam-1", offer, rounds(), 1, known=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"direction": "down"}, Reason.MALFORMED),
        ({"fleet": "harbour"}, Reason.WRONG_FLEET),
        ({"client_id": "cam-2"}, Reason.UNKNOWN_CLIENT),
        ({"num_known": 3, "known": False}, Reason.UNKNOWN_CLIENT),
        ({"round": 3}, Reason.WRONG_ROUND),
        ({"round": 5}, Reason.WRONG_ROUND),
        ({"round_": rounds("cam-1")}, Reason.STALE_VERSION),
        ({"blobs": (replace(BLOB, name="sub-generator/0", size_bytes=100),) * 3, "parts": ()}, Reason.TOO_LARGE),
        ({"blobs": (replace(BLOB, name="sub-generator/1"),)}, Reason.WRONG_LAYOUT),
        ({"blobs": (replace(BLOB, name="sub-generator/0", size_bytes=66_000),), "parts": ()}, Reason.TOO_LARGE),
        ({"blobs": (replace(BLOB, size_bytes=60_000),) * 2, "parts": ()}, Reason.TOO_LARGE),  # 120,000 bytes in all
        ({"parts": (BundlePart(BLOB.digest, 4001, "zstd"),)}, Reason.TOO_LARGE),
        ({"parts": (BundlePart("cd" * 32, 1, "raw"),)}, Reason.TOO_LARGE),  # of no blob in the manifest
    ],
)
def test_anything_else_is_refused_with_its_reason(changes: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(UploadRejected) as refused:
        check(**changes)
    assert refused.value.reason is reason


def test_a_round_that_closed_while_the_upload_travelled_takes_it_no_more() -> None:
    closed = rounds("cam-2", "cam-3", "cam-4")
    assert closed.decide(0.0) is Decision.CLOSE_QUORUM
    with pytest.raises(UploadRejected) as refused:
        GATE.check_round(MANIFEST, closed, "cam-1")
    assert refused.value.reason is Reason.WRONG_ROUND
    assert what_next(closed) == "round 4 is aggregating, the next download brings the client up to date"


@pytest.mark.parametrize(("late", "takes"), [(0, {4}), (1, {3, 4}), (3, {1, 2, 3, 4})])
def test_a_round_takes_uploads_that_are_as_late_as_the_fleet_says_and_none_from_the_future(
    late: int, takes: set[int]
) -> None:
    round_ = Rounds(RoundRules(num_clients=3, late_rounds=late), 0.0, index=4)
    assert {index for index in range(9) if round_.takes(index)} == takes
    for index in range(9):
        with nullcontext() if index in takes else pytest.raises(UploadRejected, match="is for round"):
            check(round_=round_, round=index)


def test_a_late_upload_waits_for_the_next_round_instead_of_being_refused_for_good() -> None:
    closed = Rounds(RoundRules(num_clients=1, late_rounds=1), 0.0, index=4, accepted=("cam-2",))
    closed.decide(0.0)
    with pytest.raises(UploadRejected) as refused:
        GATE.check_round(MANIFEST, closed, "cam-1")
    assert refused.value.reason is Reason.BUSY
    with pytest.raises(UploadRejected) as too_late:
        GATE.check_round(replace(MANIFEST, round=3), closed, "cam-1")
    assert too_late.value.reason is Reason.WRONG_ROUND, "the next round is two rounds after it"


def test_operators_read_how_the_round_goes_on() -> None:
    assert what_next(rounds("cam-2")) == "the round goes on with 1 of 3 clients"
