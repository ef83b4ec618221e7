"""What pages show of a fleet: values, made from the store and the journal, or from what the running loop says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from replayfleet.aggregator.console.samples import Held
from replayfleet.aggregator.console.story import ClientStory, Event, Story
from replayfleet.aggregator.control.view import FleetView, MemberView
from replayfleet.aggregator.operator.status import Status, read_status
from replayfleet.devices.profiles import FP32
from replayfleet.federation.service.waits import Why
from replayfleet.federation.wire.protocol.messages import spoken

_TONES = {"revoked": "bad", "excluded": "warn", "online": "good"}
"""How the state of a client is coloured; of other states it depends on whether the round waits for it."""


@dataclass(frozen=True, slots=True)
class Member:
    """One client as a row.

    Attributes:
        state: one word: ``online``, ``offline``, ``excluded``, ...
        tone: how it is coloured: ``good``, ``quiet``, ``warn``.
        why: what it does or is waited for, in words.
        accuracy: newest share in [0, 1], of a detector that of the boxes it finds; None where none was reported.
        change: of the accuracy since the report before.
        num_troubles: rejected, refused, failed and rolled back since the journal begins.
        seen_at: Unix time; None if never heard of.
        may_return: whether it could be rolled back, whatever the round does.
    """

    client: str
    state: str
    tone: str
    why: str
    device: str
    version: str
    is_confirmed: bool
    has_uploaded: bool
    is_awaited: bool
    accuracy: float | None
    change: float | None
    bytes_up: int
    bytes_down: int
    num_troubles: int
    last_trouble: Event | None = field(compare=False)
    seen_at: float | None = field(compare=False)
    is_excluded: bool = False
    may_return: bool = False


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet as its pages show it.

    Attributes:
        is_live: whether the aggregator's loop answers; else this is what lies on its disk.
        course: ``running``, ``draining`` or ``paused``.
        rests: whether the open round hasn't begun.
        deadline_at: Unix time at which the open round closes at the latest; None unless open, and while no aggregator
            runs: the next one counts it anew.
        at_least: uploads with which it closes then; None if unknown.
        notices: what is wrong with the aggregator itself, or why the round isn't over.
        refusals: why verbs can't be done now, by name.
        held: sub-generators since the last round.
    """

    name: str
    method: str
    seed: int
    stores_data: bool
    round: int
    phase: str
    expected: int
    at_least: int | None
    members: tuple[Member, ...]
    notices: tuple[str, ...]
    is_live: bool
    course: str = "running"
    rests: bool = False
    refusals: Mapping[str, str] = field(default_factory=dict)
    deadline_at: float | None = field(default=None, compare=False)
    held: Held = field(default_factory=Held, compare=False)

    @property
    def uploaded(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.has_uploaded)

    @property
    def awaited(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.is_awaited)

    @property
    def belonging(self) -> tuple[Member, ...]:
        """Those that weren't revoked."""
        return tuple(member for member in self.members if member.state != "revoked")

    @property
    def accuracy(self) -> float | None:
        """Mean of the newest ones of those that belong to it."""
        known = [member.accuracy for member in self.belonging if member.accuracy is not None]
        return fmean(known) if known else None

    def member(self, client: str) -> Member | None:
        return next((member for member in self.members if member.client == client), None)


def fleet_on_disk(folder: Path, story: Story) -> Fleet:
    """Return what store and journal say, also of an aggregator that doesn't run.

    Raises:
        SettingsError: No aggregator has run there, or its database is damaged.
    """
    status = read_status(folder)
    now = story.rounds.get(status.round)
    expected = (now and now.expected) or int(story.started.get("clients") or 0) or len(status.clients)
    return Fleet(
        notices=("The aggregator isn't running: this is what it left on its disk.",) * (status.phase != "finished"),
        name=status.fleet,
        method=status.method,
        seed=status.seed,
        stores_data=status.stores_data,
        round=status.round,
        phase=status.phase,
        expected=expected,
        at_least=None,
        members=_members(status, story),
        is_live=False,
    )


def _members(status: Status, story: Story) -> tuple[Member, ...]:
    found = []
    for known in status.clients:
        told = story.clients.get(known.client) or ClientStory()
        has_uploaded = known.client in status.uploads
        left_out = known.stands.removeprefix("is ")  # excluded, revoked or isn't enrolled
        awaited = status.phase == "open" and not has_uploaded and not left_out
        found.append(
            Member(
                client=known.client,
                # Nobody has looked since the aggregator ended.
                state=left_out or ("not known" if told.online else "offline"),
                tone=_TONES.get(left_out, "quiet"),
                why=_why(known.version, known.confirmed_version, awaited=awaited),
                version=spoken(known.version),
                is_confirmed=known.confirmed_version == known.version > 0,
                has_uploaded=has_uploaded,
                is_awaited=awaited,
                is_excluded=left_out == "excluded",
                seen_at=told.seen_at,
                **from_story(told),
            )
        )
    return tuple(found)


def fleet_alive(view: FleetView, before: Fleet, story: Story, now: float) -> Fleet:
    """Return what the running loop says.

    Args:
        view: the loop's.
        before: what the store says of things that don't change.
        story: the journal's.
        now: Unix time.
    """
    # A round that waits for uploads or is aggregated is no trouble, and the headline says it; a pause is a wait.
    notices = [wait.text for wait in view.waits if wait.reason not in {Why.UPLOAD, Why.AGGREGATION}]
    if view.course == "draining":
        notices.append("The fleet pauses when this round is committed.")
    stands_still = view.course == "paused" or view.rests
    return Fleet(
        name=view.fleet,
        method=view.method,
        seed=before.seed,
        stores_data=before.stores_data,
        round=view.round,
        phase=view.phase,
        course=view.course,
        rests=view.rests,
        refusals=view.refusals,
        expected=view.expected,
        at_least=view.at_least,
        members=tuple(_alive(member, story.clients.get(member.client) or ClientStory()) for member in view.members),
        notices=tuple(notices),
        is_live=True,
        deadline_at=now + view.remaining_s if view.phase == "open" and not stands_still else None,
    )


def _alive(member: MemberView, told: ClientStory) -> Member:
    if member.revoked:
        state = "revoked"
    elif member.exclusion is not None:
        state = "excluded"
    else:
        state = "online" if member.live else "offline"
    why = member.wait.text if member.wait is not None else member.phase if member.live else ""
    known = from_story(told)
    device = _device(member.device, member.provider, member.precision)
    return Member(
        client=member.client,
        state=state,
        tone=_TONES.get(state, "warn" if member.is_awaited else "quiet"),
        why=why,
        version=spoken(member.version),
        is_confirmed=member.confirmed_version == member.version > 0,
        has_uploaded=member.uploaded,
        is_awaited=member.is_awaited,
        is_excluded=member.exclusion is not None,
        may_return=member.may_return,
        seen_at=member.seen_at,
        **{**known, "device": device or known["device"]},
    )


def from_story(told: ClientStory) -> Mapping[str, Any]:
    """Return the fields of a ``Member`` that the journal alone knows."""
    known = [metrics[told.measure] for _, metrics in told.reports if told.measure in metrics]
    return {
        "device": _device(told.device, told.provider),
        "accuracy": known[-1] if known else None,
        "change": known[-1] - known[-2] if len(known) > 1 else None,
        "bytes_up": told.bytes_up,
        "bytes_down": told.bytes_down,
        "num_troubles": sum(told.troubles.values()),
        "last_trouble": told.last_trouble,
    }


def _device(name: str, provider: str, precision: str = FP32) -> str:
    """What a client computes with, and in which precision if that isn't float32."""
    runtime = provider.removesuffix("ExecutionProvider").replace("rt", "RT")
    return " · ".join(filter(None, (name, runtime, "" if precision == FP32 or not name else precision)))


def _why(version: int, confirmed: int, *, awaited: bool) -> str:
    if not awaited:
        return ""
    return "its upload wasn't there" if confirmed == version > 0 else "it hadn't confirmed this round's models"
