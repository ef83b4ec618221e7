"""Makes the view of a running aggregator, on the loop's thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from replayfleet.aggregator.control.view import FleetView, MemberView
from replayfleet.aggregator.control.waits import Facts, wait_of
from replayfleet.aggregator.parts import Parts
from replayfleet.aggregator.records.roll import Standing
from replayfleet.aggregator.rounds.machine import Course, Phase, Rounds
from replayfleet.devices.profiles import FP32


def look(parts: Parts, rounds: Rounds, now: float, refusals: Mapping[str, str]) -> FleetView:
    """Where the run stands, every client, and which verbs can't be done."""
    standings, returnable = parts.store.roll.refresh().values(), parts.store.versions.returnable()
    members = tuple(
        replace(
            _view(parts, rounds, standing, now),
            may_return=standing.client in returnable and not parts.store.leaves_out(standing.client),
        )
        for standing in standings
        if standing.is_client
    )
    return FleetView(
        fleet=parts.spec.fleet,
        method=parts.spec.method,
        leads=parts.leadership.leads,
        round=rounds.index,
        phase=rounds.phase.value,
        course=rounds.course.value,
        uploads=rounds.accepted,
        expected=rounds.quorum,
        at_least=rounds.rules.min_clients,
        remaining_s=rounds.remaining_s(now),
        members=members,
        rests=rounds.rests,
        refusals=refusals,
    )


def _view(parts: Parts, rounds: Rounds, standing: Standing, now: float) -> MemberView:
    client = standing.client
    presence, live = parts.presence.last(client), parts.presence.is_live(client)
    uploaded = rounds.counts(client)
    awaited = rounds.phase is Phase.OPEN and standing.is_expected and not uploaded
    download = parts.store.newest_download(client, standing.version)
    is_current = download is not None and download.round == rounds.index
    age_s = parts.presence.age_s(client, now)
    return MemberView(
        client=client,
        is_member=standing.is_member,
        enrolled=standing.enrolled_at is not None,
        revoked=standing.revoked_at is not None,
        trains=standing.trains,
        exclusion=standing.exclusion,
        live=live,
        seen_at=standing.seen_at if age_s is None else parts.wall_clock() - age_s,
        device=presence.device if presence else "",
        provider=presence.provider if presence else "",
        phase=presence.phase if presence else "",
        round=presence.round if presence else -1,
        serving_version=presence.serving_version if presence else -1,
        version=standing.version,
        confirmed_version=standing.confirmed_version,
        uploaded=uploaded,
        is_awaited=awaited,
        wait=wait_of(
            standing,
            presence,
            live=live,
            awaited=awaited,
            version=standing.version if is_current else 0,
            other_device=standing.enrolled_at is not None and parts.ring.other_uses(client, now),
        ),
        precision=FP32 if download is None or download.serving is None else download.serving.precision,
        notice="" if download is None else download.notice,
        labels_waiting=presence.labels_waiting if presence else -1,
        picture_age_s=_grown(presence.picture_age_s, age_s) if presence else -1.0,
    )


def _grown(told_s: float, ago_s: float | None) -> float:
    """An age that was told a while ago; -1 if it was unknown."""
    return told_s if told_s < 0 or ago_s is None else told_s + ago_s


def facts_of(parts: Parts, rounds: Rounds, now: float) -> Facts:
    """Return what decides why the round waits; the service adds broker and certificate."""
    standings = parts.store.roll.standings.values()
    members = [standing for standing in standings if standing.is_member]
    views = [_view(parts, rounds, standing, now) for standing in standings if standing.is_client]
    return Facts(
        disk=parts.disk.problem,
        failure=parts.aggregation.failure,
        standby=parts.leadership.notice,
        paused=rounds.course is Course.PAUSED and rounds.phase is not Phase.FINISHED,
        rests_s=rounds.rests_s(now) if parts.leadership.leads else 0.0,
        begins=rounds.awaits(now),
        round=rounds.index,
        is_open=rounds.is_open,
        aggregates=rounds.phase is Phase.AGGREGATING and not parts.disk.problem,
        num_uploads=rounds.num_accepted,
        quorum=rounds.quorum,
        at_least=rounds.rules.min_clients,
        num_trainers=sum(standing.is_expected for standing in members),
        num_free=max(0, (rounds.rules.num_clients or 0) - len(members)),
        num_extensions=rounds.num_extensions,
        awaited=[(view.client, view.wait.text if view.wait else "") for view in views if view.is_awaited],
    )
