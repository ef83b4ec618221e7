"""Why a round waits for a client, or doesn't, and what keeps the aggregator: decided from values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from replayfleet.aggregator.records.roll import Standing
from replayfleet.federation.service.waits import (
    COMMON_PATIENCE,
    MemberFacts,
    Patience,
    Wait,
    Why,
    common_waits,
    ordered,
)
from replayfleet.federation.service.words import count_of
from replayfleet.federation.wire.protocol.messages import Presence, spoken

MAX_NAMED = 5

PATIENCE: dict[Why, Patience] = COMMON_PATIENCE | {
    Why.AGGREGATION_FAILS: Patience(0, 0),
    Why.STANDBY: Patience(),
    Why.TOO_FEW_CLIENTS: Patience(10, 60),
    Why.ROUND_LATE: Patience(0, 0),
    Why.UPLOAD: Patience(),
    Why.AGGREGATION: Patience(60),  # with large fleets on a CPU it takes hours, and all is well
}
"""Of the aggregator, in the order of importance."""
_HINDERS_NOTHING = frozenset({Why.CLOCK_WRONG, Why.CERTIFICATE_ENDS})
"""What a client says of itself that no round waits for."""


def wait_of(  # what the store, the client and the network know of it
    standing: Standing,
    presence: Presence | None,
    *,
    live: bool,
    awaited: bool,
    version: int,
    other_device: bool = False,
) -> Wait | None:
    """Return why a client doesn't take part, or what the open round waits for.

    Args:
        standing: as the store knows it.
        presence: what it said last; None if it wasn't heard of since the start.
        live: whether it is there.
        awaited: whether the open round waits for its upload.
        version: of the download for this round; 0 if there is none yet.
        other_device: one with another key uses its name, and it wasn't heard since.

    Returns:
        None if there is nothing to say.
    """
    wait = outside(standing)
    if wait is not None or presence is None or not live:
        return wait or (_absent(standing, presence, other_device=other_device) if awaited else None)
    if presence.reason in {Why.EXCLUDED.value, Why.REVOKED.value}:  # its last word, from before it was taken in again
        return Wait(Why.MODELS, "it is admitted again, and hasn't been heard since")
    own, inside = own_word(presence), _inside(standing, presence, version) if awaited else None
    if own is not None and inside is not None and own.reason in _HINDERS_NOTHING:
        return Wait(inside.reason, f"{inside.text}; {own.text}")
    return own or inside


def outside(standing: Standing) -> Wait | None:
    """Return why no round waits for a client; None if they do."""
    client, exclusion = standing.client, standing.exclusion
    if standing.revoked_at is not None:
        return Wait(Why.REVOKED, f"its certificates count no more; `aggregator enroll {client}` takes it in again")
    if standing.is_stranger:
        return Wait(Why.REVOKED, f"it was never enrolled, and others are; `aggregator enroll {client}` takes it in")
    if exclusion is not None:
        return Wait(Why.EXCLUDED, f"excluded by {exclusion.spoken}; `aggregator readmit {client}` brings it back")
    if not standing.trains:
        return Wait(Why.SERVES_ONLY, "it serves and doesn't train, by its install or --no-train; no round waits for it")
    return None


def own_word(presence: Presence) -> Wait | None:
    """Return what a client says keeps it from its work; a reason that this build doesn't know is none."""
    known = presence.reason in {why.value for why in Why}
    return Wait(Why(presence.reason), presence.why) if known else None


def _absent(standing: Standing, presence: Presence | None, *, other_device: bool) -> Wait:
    if other_device:
        return Wait(
            Why.OFFLINE,
            f"a device with its name has another signing.key, so nothing of it counts: bring its identity folder back, "
            f"or `aggregator revoke {standing.client}` and `aggregator enroll {standing.client}` it anew",
        )
    if presence is None and standing.seen_at is None:
        return Wait(Why.NEVER_SEEN, "it was enrolled and never came; start it, or exclude it")
    return Wait(Why.OFFLINE, "it isn't connected; look at the device and its network, or exclude it")


def _inside(standing: Standing, presence: Presence, version: int) -> Wait:
    """What the open round waits for."""
    phase = presence.phase or "no phase told"
    if version == 0 or standing.confirmed_version < version:
        sent = f"version {spoken(version)}" if version else "its models"
        return Wait(Why.MODELS, f"it doesn't serve {sent} of this round yet: {phase}")
    return Wait(Why.UPLOAD, f"its upload: {phase}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts(MemberFacts):
    """All that decides why an aggregator waits.

    Attributes:
        failure: why the newest round has no aggregation; empty if it has one.
        standby: why it doesn't lead; empty if it does.
        round: the current round.
        is_open: whether it takes uploads.
        aggregates: whether models are made of them.
        num_uploads: that it has.
        quorum: with how many it closes at once.
        at_least: with how many it closes at its deadline.
        num_trainers: members that rounds wait for.
        num_free: places of the planned fleet that nobody took yet.
        num_extensions: how often its deadline came with too few.
        awaited: (client, why) of those it waits for, sorted.
    """

    member: str = "aggregator"
    failure: str = ""
    standby: str = ""
    round: int = 0
    is_open: bool = True
    aggregates: bool = False
    num_uploads: int = 0
    quorum: int = 1
    at_least: int = 1
    num_trainers: int = 1
    num_free: int = 0
    num_extensions: int = 0
    awaited: Sequence[tuple[str, str]] = ()


def fleet_waits(facts: Facts) -> tuple[Wait, ...]:
    """Return all that keeps an aggregator from its work, the most important first."""
    if facts.standby:
        rest: Iterable[Wait] = [Wait(Why.STANDBY, facts.standby)]
    elif facts.aggregates:
        text = f"round {facts.round} is being aggregated from {count_of(facts.num_uploads, 'upload')}"
        rest = [
            Wait(Why.AGGREGATION, f"{text}; if that lasts far longer than before, restart the aggregator: none is lost")
        ]
    else:
        rest = _of_the_round(facts) if facts.is_open and not (facts.paused or facts.rests_s) else ()
    if facts.failure and not facts.standby:
        rest = (Wait(Why.AGGREGATION_FAILS, facts.failure), *rest)
    return ordered((*common_waits(facts), *rest), PATIENCE)


def _of_the_round(facts: Facts) -> Iterator[Wait]:
    there = f"round {facts.round} has {count_of(facts.num_uploads, 'upload')}"
    if facts.num_trainers + facts.num_free < facts.at_least:
        yield Wait(
            Why.TOO_FEW_CLIENTS,
            f"members that train: {facts.num_trainers}, and a round closes with {facts.at_least} at least: no round "
            "ends until another one takes part, or --min-clients is lower",
        )
    named = [f"{client} ({why})" for client, why in facts.awaited[:MAX_NAMED]]
    if len(facts.awaited) > MAX_NAMED:
        named.append(f"{len(facts.awaited) - MAX_NAMED} more")
    if facts.num_free:
        named.append(f"{facts.num_free} of --clients that nobody has taken")
    whom = ", ".join(named) or "a client that trains"
    if facts.num_extensions:
        yield Wait(
            Why.ROUND_LATE,
            f"{there}, its deadline came {count_of(facts.num_extensions, 'time')} with fewer than {facts.at_least}; "
            f"it waits for {whom}",
        )
    elif facts.num_uploads < facts.quorum:
        yield Wait(Why.UPLOAD, f"{there} of {facts.quorum}; it waits for {whom}")
