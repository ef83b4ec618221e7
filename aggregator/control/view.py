"""What operators see of a running aggregator: values, made by its loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from replayfleet.aggregator.records.roll import Exclusion
from replayfleet.devices.profiles import FP32
from replayfleet.federation.service.waits import Wait


@dataclass(frozen=True, slots=True)
class MemberView:
    """One client, as the store and its presence tell.

    Attributes:
        client: client id.
        is_member: False for a newcomer that confirmed nothing yet.
        enrolled: by an operator.
        revoked: its certificate and signature count no more.
        trains: False for one that only serves.
        exclusion: None for one that takes part.
        live: whether it is there now.
        seen_at: Unix time at which it was heard of; None for never.
        device: its device profile; empty if not heard of since the start.
        provider: its execution provider.
        phase: what it says that it does.
        round: the round that it knows; -1 for none.
        serving_version: of the model that it serves; -1 for none or unknown.
        version: of its newest download; 0 for none.
        confirmed_version: of the newest one that it confirmed; 0 for none.
        uploaded: whether the current round has its upload.
        is_awaited: whether the current round waits for it.
        wait: why it doesn't take part, or what it is waited for; None if there is nothing to say.
        precision: what the model of its newest download computes in.
        notice: what that download tells it, of its last upload or of its model.
        labels_waiting: labelled samples that it has for the next round; -1 if unknown.
        may_return: whether it could be rolled back: it gets models, and earlier ones are kept.
        picture_age_s: since the newest picture of that of its cameras that gave none for longest; -1 if unknown.
    """

    client: str
    is_member: bool
    enrolled: bool
    revoked: bool
    trains: bool
    exclusion: Exclusion | None
    live: bool
    seen_at: float | None
    device: str
    provider: str
    phase: str
    round: int
    serving_version: int
    version: int
    confirmed_version: int
    uploaded: bool
    is_awaited: bool
    wait: Wait | None
    precision: str = FP32
    notice: str = ""
    labels_waiting: int = -1
    picture_age_s: float = -1.0
    may_return: bool = True


@dataclass(frozen=True, slots=True)
class FleetView:
    """Where the run stands.

    Attributes:
        fleet: its name.
        method: that it runs.
        leads: whether this aggregator leads it.
        round: the current round.
        phase: ``open``, ``aggregating`` or ``finished``.
        course: ``running``, ``draining`` (paused after this round) or ``paused``.
        uploads: clients whose upload it has, sorted.
        expected: with how many uploads it closes at once.
        at_least: with how many it closes at its deadline.
        remaining_s: seconds to the deadline; 0 unless open.
        members: all clients, sorted.
        waits: why the round isn't over, and what is wrong with the aggregator; the most important first.
        healthy: whether the aggregator does its work.
        rests: whether the open round hasn't begun.
        refusals: why verbs can't be done now, by name, whatever client they name.
    """

    fleet: str
    method: str
    leads: bool
    round: int
    phase: str
    course: str
    uploads: tuple[str, ...]
    expected: int
    at_least: int
    remaining_s: float
    members: tuple[MemberView, ...]
    waits: tuple[Wait, ...] = ()
    healthy: bool = True
    rests: bool = False
    refusals: Mapping[str, str] = field(default_factory=dict)
