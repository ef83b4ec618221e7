"""Why something lasts: a reason for machines, a sentence for people with what to do; ``docs/errors.md`` has them."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from replayfleet.federation.service.credentials.identity import SOON_S
from replayfleet.federation.service.words import count_of


class Why(str, enum.Enum):
    """What keeps a client, a round or an aggregator; the values are bounded labels of metrics."""

    BROKER_REFUSES = "broker-refuses"
    NO_BROKER = "no-broker"
    NO_AGGREGATOR = "no-aggregator"
    UNTRUSTED = "untrusted"
    EXCLUDED = "excluded"
    REVOKED = "revoked"
    SERVES_ONLY = "serves-only"
    PAUSED = "paused"
    NOT_DUE = "not-due"
    DISK = "disk"
    CAMERA = "camera"
    SAMPLES = "samples"
    ROLLED_BACK = "rolled-back"
    TRAINING_FAILED = "training-failed"
    MODELS = "models"
    BUSY = "busy"
    TOO_FEW_LABELS = "too-few-labels"
    CLOCK_WRONG = "clock-wrong"
    CERTIFICATE_ENDS = "certificate-ends"
    CERTIFICATE_ENDED = "certificate-ended"
    CERTIFICATE_EARLY = "certificate-early"
    NEVER_SEEN = "never-seen"
    OFFLINE = "offline"
    UPLOAD = "upload"
    STANDBY = "standby"
    TOO_FEW_CLIENTS = "too-few-clients"
    ROUND_LATE = "round-late"
    AGGREGATION_FAILS = "aggregation-fails"
    AGGREGATION = "aggregation"


@dataclass(frozen=True, slots=True)
class Wait:
    """Why something lasts.

    Attributes:
        reason: for machines and labels.
        text: what it is and what to do, one line.
    """

    reason: Why
    text: str


@dataclass(frozen=True, slots=True)
class Patience:
    """How long something may last.

    Attributes:
        told_after_s: before it is worth a word.
        hurts_after_s: before a service isn't healthy; infinite where that is as somebody wanted it.
    """

    told_after_s: float = 0.0
    hurts_after_s: float = float("inf")


LOGGED_AFTER_S = 10.0
"""Most waits end by themselves before."""


class Waits:
    """Remembers since when each wait lasts; ``now`` in seconds, of a clock that never runs backwards.

    Args:
        patience: for each reason that may come.
    """

    def __init__(self, patience: dict[Why, Patience]) -> None:
        self._patience = patience
        self._since: dict[Why, float] = {}
        self._logged: set[Why] = set()
        self._current: tuple[Wait, ...] = ()
        self._now = 0.0

    def note(self, current: Iterable[Wait], now: float) -> tuple[Wait, ...]:
        """Take what is the case now, the most important first; returns what lasts so long that the log should say it.

        Each is returned once for as long as it lasts, and none that somebody wanted (a pause, a plan).
        """
        self._current, self._now = tuple(current), now
        self._since = {wait.reason: self._since.get(wait.reason, now) for wait in self._current}
        self._logged &= self._since.keys()
        new = tuple(wait for wait in self.told if wait.reason not in self._logged and self._deserves_a_line(wait))
        self._logged.update(wait.reason for wait in new)
        return new

    def _deserves_a_line(self, wait: Wait) -> bool:
        return self.lasted_s(wait) >= LOGGED_AFTER_S and self._patience[wait.reason].hurts_after_s < float("inf")

    @property
    def told(self) -> tuple[Wait, ...]:
        """What lasts long enough to be told."""
        return tuple(wait for wait in self._current if self.lasted_s(wait) >= self._patience[wait.reason].told_after_s)

    @property
    def hurt(self) -> bool:
        """Whether something lasts so long that the work isn't done."""
        return any(self.lasted_s(wait) >= self._patience[wait.reason].hurts_after_s for wait in self._current)

    def rows(self) -> list[dict[str, Any]]:
        """Return what is told as JSON has it."""
        return [
            {"reason": wait.reason.value, "text": wait.text, "lasts_s": round(self.lasted_s(wait), 1)}
            for wait in self.told
        ]

    def lasted_s(self, wait: Wait) -> float:
        """Return for how long something is the case."""
        return self._now - self._since.get(wait.reason, self._now)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberFacts:
    """What decides why any member of a fleet waits, client or aggregator.

    Attributes:
        member: its name among the members.
        connected: whether the broker accepted it.
        broker: how it stands with the broker, in words.
        refusal: what the broker has against it; empty: nothing.
        disk: why nothing is written; empty if all is well.
        certificate_left_s: seconds until its certificate ends; None where it has none.
        too_early: from when its certificate counts and what its clock says, in words; empty if it does already.
        paused: whether an operator paused the fleet.
        rests_s: seconds until the round is due, when last heard of; 0 if it is, infinite where no clock says when.
        begins: when it begins, in words that follow "it begins".
    """

    member: str
    connected: bool = True
    broker: str = "connected"
    refusal: str = ""
    disk: str = ""
    certificate_left_s: float | None = None
    too_early: str = ""
    paused: bool = False
    rests_s: float = 0.0
    begins: str = "when the aggregator says so; its status says what it waits for"


COMMON_PATIENCE = {
    Why.CERTIFICATE_EARLY: Patience(0, 0),
    Why.BROKER_REFUSES: Patience(0, 0),
    Why.NO_BROKER: Patience(10, 30),
    Why.CERTIFICATE_ENDED: Patience(0, 0),
    Why.DISK: Patience(0, 0),
    Why.PAUSED: Patience(),
    Why.NOT_DUE: Patience(),
    Why.CERTIFICATE_ENDS: Patience(),
}


def common_waits(facts: MemberFacts) -> Iterator[Wait]:
    """Yield what may keep any member from its work."""
    if facts.refusal:
        yield Wait(Why.BROKER_REFUSES, facts.refusal)
    elif not facts.connected:
        yield Wait(Why.NO_BROKER, f"no connection to the broker: {facts.broker}; look at broker, network and --broker")
    if facts.disk:
        yield Wait(Why.DISK, facts.disk)
    if facts.paused:
        text = "an operator paused the fleet: nobody begins to train, and no round closes"
        yield Wait(Why.PAUSED, f"{text}; `aggregator resume` lets rounds go on")
    elif facts.rests_s:
        text = f"the next round isn't due yet: it begins {facts.begins}"
        yield Wait(Why.NOT_DUE, text)
    left_s, renew = facts.certificate_left_s, f"`aggregator renew {facts.member}`"
    if facts.too_early:
        text = f"its certificate is {facts.too_early}: set it (timedatectl set-ntp true)"
        yield Wait(Why.CERTIFICATE_EARLY, f"{text}, or if the clock is right, {renew}")
    elif left_s is not None and left_s <= 0:
        yield Wait(Why.CERTIFICATE_ENDED, f"its certificate has ended, or its clock is wrong; {renew}")
    elif left_s is not None and left_s < SOON_S:
        yield Wait(Why.CERTIFICATE_ENDS, f"its certificate ends in {count_of(round(left_s / 86400), 'day')}; {renew}")


def ordered(found: Iterable[Wait], patience: dict[Why, Patience]) -> tuple[Wait, ...]:
    """Return waits in the order of ``patience``: what stands first is often why the rest is so."""
    order = list(patience)
    return tuple(sorted(found, key=lambda wait: order.index(wait.reason)))
