"""Why a round waits for a client, and what keeps the aggregator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from replayfleet.aggregator.control.waits import PATIENCE, Facts, fleet_waits, wait_of
from replayfleet.aggregator.records.roll import Exclusion, Standing
from replayfleet.federation.service.waits import Why
from replayfleet.federation.wire.protocol.messages import Presence

MEMBER = Standing("cam-1", took_part=True, confirmed_version=3, seen_at=1.0)
THERE = Presence("cam-1", "online", "boot", 1, phase="training in progress")
FEW = "12 of 40 labelled samples"


def presence(**changes: Any) -> Presence:
    return Presence("cam-1", "online", "boot", 1, phase="training in progress", **changes)


@pytest.mark.parametrize(
    ("standing", "said", "live", "awaited", "why", "text"),
    [
        (replace(MEMBER, revoked_at=1.0), THERE, True, True, Why.REVOKED, "`aggregator enroll cam-1`"),
        (replace(MEMBER, is_stranger=True), THERE, True, True, Why.REVOKED, "never enrolled, and others are"),
        (replace(MEMBER, exclusion=Exclusion(1.0, "ana", "")), THERE, True, False, Why.EXCLUDED, "by ana; "),
        (replace(MEMBER, trains=False), THERE, True, False, Why.SERVES_ONLY, "no round waits for it"),
        (replace(MEMBER, seen_at=None), None, False, True, Why.NEVER_SEEN, "never came"),
        (MEMBER, None, False, True, Why.OFFLINE, "isn't connected"),
        (MEMBER, THERE, False, True, Why.OFFLINE, "isn't connected"),
        (MEMBER, THERE, True, True, Why.UPLOAD, "training in progress"),
        (replace(MEMBER, confirmed_version=2), THERE, True, True, Why.MODELS, "version 3 of this round"),
        (MEMBER, presence(reason="too-few-labels", why=FEW), True, True, Why.TOO_FEW_LABELS, FEW),
        (MEMBER, presence(reason="clock-wrong", why="it is late"), True, True, Why.UPLOAD, "in progress; it is late"),
        (MEMBER, presence(reason="clock-wrong", why="it is late"), True, False, Why.CLOCK_WRONG, "it is late"),
        (MEMBER, presence(reason="rolled-back", why="it crashed"), True, False, Why.ROLLED_BACK, "it crashed"),
        (MEMBER, presence(reason="excluded", why="excluded"), True, False, Why.MODELS, "admitted again"),
        (MEMBER, presence(reason="<script>", why="x"), True, True, Why.UPLOAD, "training in progress"),
    ],
    ids=lambda value: value.value if isinstance(value, Why) else "",
)
def test_each_client_has_one_reason(
    standing: Standing, said: Presence | None, live: bool, awaited: bool, why: Why, text: str
) -> None:
    found = wait_of(standing, said, live=live, awaited=awaited, version=3)
    assert (found.reason, text in found.text) == (why, True), found


def test_who_has_done_its_part_or_is_away_while_nobody_waits_has_nothing_to_say() -> None:
    assert wait_of(MEMBER, THERE, live=True, awaited=False, version=3) is None
    assert wait_of(MEMBER, None, live=False, awaited=False, version=3) is None


def test_who_is_away_while_another_key_uses_its_name_isnt_looked_for_on_the_network() -> None:
    found = wait_of(MEMBER, None, live=False, awaited=True, version=3, other_device=True)
    assert (found.reason, "another signing.key" in found.text) == (Why.OFFLINE, True)
    assert wait_of(MEMBER, THERE, live=True, awaited=False, version=3, other_device=True) is None


def test_a_fleet_that_nobody_has_come_to_waits_for_somebody() -> None:
    found = fleet_waits(Facts(num_trainers=0))
    assert "0 uploads of 1; it waits for a client that trains" in found[-1].text


AWAITED = [(f"cam-{number}", "offline") for number in range(1, 8)]


@pytest.mark.parametrize(
    ("facts", "why", "text"),
    [
        ({"refusal": "not authorized"}, [Why.BROKER_REFUSES], "not authorized"),
        ({"connected": False, "broker": "refused"}, [Why.NO_BROKER], "refused"),
        ({"disk": "disk full"}, [Why.DISK], "disk full"),
        ({"failure": "round 1 has none"}, [Why.AGGREGATION_FAILS], "round 1 has none"),
        ({"standby": "standing by", "num_uploads": 0}, [Why.STANDBY], "standing by"),
        ({"paused": True, "quorum": 5}, [Why.PAUSED], "resume"),
        ({"rests_s": 40.0, "begins": "in 40 s", "quorum": 5}, [Why.NOT_DUE], "isn't due yet: it begins in 40 s"),
        ({"certificate_left_s": 86400.0}, [Why.CERTIFICATE_ENDS], "`aggregator renew aggregator`"),
        (
            {"quorum": 7, "awaited": AWAITED, "round": 2},
            [Why.UPLOAD],
            "round 2 has 0 uploads of 7; it waits for cam-1 (offline), cam-2 (offline), cam-3 (offline), "
            "cam-4 (offline), cam-5 (offline), 2 more",
        ),
        (
            {"num_uploads": 1, "num_extensions": 1, "at_least": 2, "num_trainers": 2},
            [Why.ROUND_LATE],
            "has 1 upload, its deadline came 1 time with fewer than 2",
        ),
        (
            {"num_extensions": 2, "at_least": 2, "num_trainers": 2, "num_uploads": 1, "awaited": AWAITED[:1]},
            [Why.ROUND_LATE],
            "its deadline came 2 times with fewer than 2; it waits for cam-1 (offline)",
        ),
        ({"at_least": 3, "quorum": 3, "num_trainers": 2}, [Why.TOO_FEW_CLIENTS, Why.UPLOAD], "members that train: 2"),
        ({"num_trainers": 0}, [Why.TOO_FEW_CLIENTS, Why.UPLOAD], "members that train: 0"),
        (
            {"is_open": False, "aggregates": True, "round": 3, "num_uploads": 2},
            [Why.AGGREGATION],
            "round 3 is being aggregated from 2 uploads",
        ),
        ({"num_free": 2, "quorum": 2, "num_trainers": 0}, [Why.UPLOAD], "2 of --clients that nobody has taken"),
    ],
    ids=str,
)
def test_an_aggregator_says_what_keeps_it(facts: dict[str, Any], why: list[Why], text: str) -> None:
    found = fleet_waits(replace(Facts(num_uploads=1), **{"num_uploads": 0, **facts}))
    told = [wait for wait in found if wait.reason is not Why.UPLOAD or Why.UPLOAD in why]
    assert [wait.reason for wait in told] == why
    assert text in told[0].text
    assert {wait.reason for wait in found} <= set(PATIENCE)


def test_an_aggregator_whose_round_is_over_has_nothing_to_say() -> None:
    assert fleet_waits(Facts(is_open=False)) == ()
    assert fleet_waits(Facts(num_uploads=1)) == ()
