"""Why a client doesn't do its work: each state has a reason, words with what to do, and a bound to what is healthy."""

from __future__ import annotations

from typing import Any

import pytest

from replayfleet.edge_client.flow import LabelProgress
from replayfleet.edge_client.operator.waits import CLOCK_SLACK_S, PATIENCE, Facts, FleetClock, waits
from replayfleet.edge_client.state_store import SentAway
from replayfleet.edge_client.sync.session_logic import Step
from replayfleet.federation.service.waits import Waits, Why

CASES: list[tuple[dict[str, Any], Why, str]] = [
    ({"connected": False, "refusal": "not authorized: enrol it"}, Why.BROKER_REFUSES, "enrol it"),
    ({"connected": False, "broker": "connection refused"}, Why.NO_BROKER, "connection refused; look at broker"),
    ({"step": Step.WAIT_AGGREGATOR}, Why.NO_AGGREGATOR, "start it"),
    ({"step": Step.WAIT_AGGREGATOR, "ignored": "28x28, not 32x32"}, Why.NO_AGGREGATOR, "follow: 28x28, not 32x32"),
    ({"trust_problem": "signed with a key", "step": Step.WAIT_AGGREGATOR}, Why.UNTRUSTED, "signed with a key"),
    ({"disk": "disk full"}, Why.DISK, "disk full"),
    ({"camera": "unplugged"}, Why.CAMERA, "unplugged"),
    ({"reading_s": 90.0, "step": Step.TRAINING, "round": 4}, Why.SAMPLES, "samples have been read for 2 min"),
    (
        {"excluded": True, "step": Step.EXCLUDED, "paused": True, "upload_problem": "no"},
        Why.EXCLUDED,
        "`aggregator readmit cam-1`",
    ),
    (
        {"shut_out": True, "step": Step.EXCLUDED, "paused": True, "upload_problem": "no"},
        Why.REVOKED,
        "`aggregator enroll cam-1` takes it in",
    ),
    ({"paused": True, "step": Step.PAUSED}, Why.PAUSED, "`aggregator resume`"),
    ({"rests_s": 40.0, "step": Step.WAIT_ROUND}, Why.NOT_DUE, "isn't due yet"),
    ({"trains": False, "step": Step.SERVE_ONLY}, Why.SERVES_ONLY, "torch isn't installed, or --no-train"),
    (
        {"step": Step.WAIT_DATA, "round": 3, "labels": LabelProgress(12, 40, 3, 5)},
        Why.TOO_FEW_LABELS,
        "12 of 40 labelled samples from 3 of 5 pictures for round 3; label more",
    ),
    ({"step": Step.WAIT_DATA, "round": 3}, Why.TOO_FEW_LABELS, "no samples for round 3"),
    (
        {"sent_away": SentAway(7, 2, "crashed", "segfault"), "serving_version": 6},
        Why.ROLLED_BACK,
        "version 7 of round 2 was rolled back (crashed: segfault); version 6 serves until a newer one comes",
    ),
    ({"training_problem": "out of memory", "round": 4}, Why.TRAINING_FAILED, "round 4 wasn't trained: out of memory"),
    ({"upload_problem": "disk full there"}, Why.BUSY, "doesn't take the upload yet: disk full there"),
    ({"upload_silent_s": 150.0}, Why.BUSY, "of the upload has reached the aggregator for 2 min: others' may go"),
    ({"step": Step.WAIT_DOWNLOAD, "round": 5}, Why.MODELS, "`aggregator history --client cam-1` says why"),
    ({"step": Step.WAIT_LAST}, Why.MODELS, "`aggregator serve` on the same data dir hands it out"),
    ({"step": Step.WAIT_DOWNLOAD, "download_problem": "(untrusted): expired"}, Why.MODELS, "(untrusted): expired"),
    (
        {"step": Step.TRAINING, "download_problem": "(crashed): killed", "serving_version": 6},
        Why.MODELS,
        "version 6 serves, for no newer model does: (crashed): killed",
    ),
    ({"clock_ahead_s": 3600.0}, Why.CLOCK_WRONG, "60 min ahead of the aggregator's"),
    ({"clock_ahead_s": -1.8e9}, Why.CLOCK_WRONG, "57 years behind the aggregator's"),
    ({"certificate_left_s": 12.4 * 86400}, Why.CERTIFICATE_ENDS, "ends in 12 days; `aggregator renew cam-1`"),
    ({"certificate_left_s": -1.0}, Why.CERTIFICATE_ENDED, "has ended"),
    (
        {"too_early": "valid from 2026-11-28 08:00 UTC; this device's clock says 1970-01-01 00:01 UTC"},
        Why.CERTIFICATE_EARLY,
        "clock says 1970-01-01 00:01 UTC: set it (timedatectl set-ntp true), or if the clock is right, "
        "`aggregator renew cam-1`",
    ),
]


@pytest.mark.parametrize(("facts", "why", "text"), CASES, ids=[f"{why.value}-{text[:12]}" for _, why, text in CASES])
def test_each_state_has_one_reason_and_says_what_to_do(facts: dict[str, Any], why: Why, text: str) -> None:
    found = waits(Facts(member="cam-1", **facts))
    assert [wait.reason for wait in found] == [why]
    assert text in found[0].text


def test_a_client_that_works_has_nothing_to_say() -> None:
    for step in (Step.WAIT_ROUND, Step.TRAINING, Step.OFFER, Step.WAIT_VERDICT, Step.FINISHED):
        assert waits(Facts(member="cam-1", step=step, certificate_left_s=1e9, clock_ahead_s=CLOCK_SLACK_S)) == ()


def test_every_reason_has_its_patience_and_the_first_is_why_the_rest_is_so() -> None:
    assert {why for _, why, _ in CASES} == set(PATIENCE)
    found = waits(Facts(member="cam-1", connected=False, step=Step.WAIT_AGGREGATOR, certificate_left_s=-1.0))
    assert [wait.reason for wait in found] == [Why.NO_BROKER, Why.CERTIFICATE_ENDED]
    found = waits(Facts(member="cam-1", refusal="bad certificate", certificate_left_s=9e9, too_early="valid from ..."))
    assert [wait.reason for wait in found] == [Why.CERTIFICATE_EARLY, Why.BROKER_REFUSES]


@pytest.mark.parametrize(
    ("facts", "told_after_s", "hurts_after_s"),
    [
        ({"excluded": True}, 0, 0),
        ({"connected": False}, 10, 30),
        ({"step": Step.WAIT_DATA}, 5, 900),
        ({"paused": True}, 0, None),
        ({"trains": False}, 0, None),
        ({"clock_ahead_s": 999.0}, 0, None),
    ],
    ids=str,
)
def test_what_lasts_is_told_and_then_hurts_unless_somebody_wanted_it(
    facts: dict[str, Any], told_after_s: float, hurts_after_s: float | None
) -> None:
    memory, found = Waits(PATIENCE), waits(Facts(member="cam-1", **facts))
    for now in (100.0, 100.0 + told_after_s - 0.1, 100.0 + told_after_s):
        memory.note(found, now)
        assert bool(memory.told) == (now - 100.0 >= told_after_s)
    for now in (100.0 + (hurts_after_s or 0) - 0.1, 100.0 + (1e6 if hurts_after_s is None else hurts_after_s)):
        memory.note(found, now)
        assert memory.hurt == (hurts_after_s is not None and now - 100.0 >= hurts_after_s)
    memory.note((), 1e7)
    assert (memory.told, memory.hurt) == ((), False)
    memory.note(found, 1e7)
    assert memory.lasted_s(found[0]) == 0.0, "it counts anew"


def test_the_log_says_once_what_lasts_and_nothing_that_somebody_wanted() -> None:
    memory, found = Waits(PATIENCE), waits(Facts(member="cam-1", step=Step.WAIT_DATA, paused=True))
    said = {now: [wait.reason for wait in memory.note(found, now)] for now in (0.0, 9.9, 10.0, 11.0, 900.0)}
    assert said == {0.0: [], 9.9: [], 10.0: [Why.TOO_FEW_LABELS], 11.0: [], 900.0: []}
    memory.note((), 901.0)
    assert not memory.note(found, 902.0)
    assert [wait.reason for wait in memory.note(found, 912.0)] == [Why.TOO_FEW_LABELS], "it lasts anew"


def test_a_device_that_has_enough_labels_asks_for_no_more_until_its_source_is_asked_again() -> None:
    labels = LabelProgress(num_samples=40, min_samples=40, num_pictures=5, min_pictures=5)
    assert not waits(Facts(member="cam-1", step=Step.WAIT_DATA, labels=labels))


def test_what_the_broker_retained_says_nothing_about_the_clock() -> None:
    clock = FleetClock()
    clock.hear(1_000_000_000, 9000.0)  # read from disk
    clock.reconnected()
    clock.hear(2_000_000_000, 9000.0)  # retained, said long ago
    assert clock.ahead_s == 0.0
    clock.hear(2_000_000_000, 9500.0)  # nothing new
    assert clock.ahead_s == 0.0
    clock.hear(8_995_000_000, 9000.0)
    assert clock.ahead_s == 5.0


def test_a_time_that_stands_says_nothing_about_the_clock() -> None:
    """That of an aggregator whose clock was ahead: it signs no message as earlier than one before it."""
    clock, year_us = FleetClock(), 31_536_000_000_000
    clock.hear(year_us, 0.0)
    for second in range(1, 60):
        clock.hear(year_us + second, float(second))
        assert clock.ahead_s == (0.0 if second >= 11 else second - (year_us + second) / 1e6)
    for second in range(61, 90):  # that time has come
        clock.hear(year_us + 1_000_000 * second, 5.0 + second)
    assert clock.ahead_s == 5.0 - year_us / 1e6
