"""Why a client doesn't do its work, in words with what to do: decided from values alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from replayfleet.edge_client.flow import LabelProgress
from replayfleet.edge_client.state_store import SentAway
from replayfleet.edge_client.sync.session_logic import Step
from replayfleet.federation.service.waits import (
    COMMON_PATIENCE,
    MemberFacts,
    Patience,
    Wait,
    Why,
    common_waits,
    ordered,
)
from replayfleet.federation.service.words import duration
from replayfleet.federation.wire.protocol.messages import spoken

CLOCK_SLACK_S = 120.0
"""A clock that is further from the fleet's is told; so much apart two aggregators may be (``sync.trust``)."""
SLOW_READ_S = 30.0
"""Samples that take longer to read are told."""
SILENT_UPLOAD_S = 120.0
"""An upload of which nothing arrives for so long is told; a block takes a quarter of it at 64 kbit/s."""
_STANDS_S = 10.0
"""What is signed must have gone on by half of this time."""
PATIENCE = {
    Why.CERTIFICATE_EARLY: COMMON_PATIENCE[Why.CERTIFICATE_EARLY],
    Why.BROKER_REFUSES: COMMON_PATIENCE[Why.BROKER_REFUSES],
    Why.NO_BROKER: COMMON_PATIENCE[Why.NO_BROKER],
    Why.CERTIFICATE_ENDED: COMMON_PATIENCE[Why.CERTIFICATE_ENDED],
    Why.UNTRUSTED: Patience(0, 0),
    Why.REVOKED: Patience(0, 0),
    Why.EXCLUDED: Patience(0, 0),
    Why.DISK: COMMON_PATIENCE[Why.DISK],
    Why.CAMERA: Patience(0, 0),
    Why.SAMPLES: Patience(0, 300),
    Why.ROLLED_BACK: Patience(0, 0),
    Why.TRAINING_FAILED: Patience(0, 0),
    Why.NO_AGGREGATOR: Patience(10, 60),
    Why.MODELS: Patience(30, 300),
    Why.BUSY: Patience(10, 120),
    Why.TOO_FEW_LABELS: Patience(5, 900),
    Why.PAUSED: COMMON_PATIENCE[Why.PAUSED],
    Why.NOT_DUE: COMMON_PATIENCE[Why.NOT_DUE],
    Why.SERVES_ONLY: Patience(),
    Why.CLOCK_WRONG: Patience(),
    Why.CERTIFICATE_ENDS: COMMON_PATIENCE[Why.CERTIFICATE_ENDS],
}
"""In the order of importance: what stands first is often why the rest is so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts(MemberFacts):
    """All that decides why a client waits.

    Attributes:
        trust_problem: why the newest announcement wasn't heard; empty if it was.
        camera: why a camera gives nothing; empty if all do.
        reading_s: how long the source has been asked for the round's samples; 0 while it isn't.
        ignored: why the aggregator's newest word isn't followed; empty if it is, or none came.
        step: what it does.
        round: that was announced; -1 for none.
        trains: whether it can and may train.
        excluded: whether it takes no part.
        shut_out: whether nothing that it signs counts.
        labels: how many wait for the round, and are needed; None where the source doesn't count them.
        sent_away: the download that was rolled back, unless a newer one is held.
        serving_version: of the model that answers; -1 for none.
        training_problem: why the round wasn't trained; empty if it was.
        download_problem: why the round's download isn't served; empty if it is, or none came.
        upload_problem: why the aggregator doesn't take the upload for now; empty if it does.
        upload_silent_s: how long nothing new of the upload has reached the aggregator; 0 while it needs none.
        clock_ahead_s: of the fleet's time; 0 if unknown.
    """

    trust_problem: str = ""
    camera: str = ""
    reading_s: float = 0.0
    ignored: str = ""
    step: Step = Step.WAIT_ROUND
    round: int = -1
    trains: bool = True
    excluded: bool = False
    shut_out: bool = False
    labels: LabelProgress | None = None
    sent_away: SentAway | None = None
    serving_version: int = -1
    training_problem: str = ""
    download_problem: str = ""
    upload_problem: str = ""
    upload_silent_s: float = 0.0
    clock_ahead_s: float = 0.0


class FleetClock:
    """How far this device's clock is from the fleet's time, which the aggregator signs several times a minute.

    Attributes:
        ahead_s: of it; 0 while it isn't known, and where it stands: an aggregator whose clock was ahead, and was put
            right, signs every message a moment later than the one before until that time has come.
    """

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._heard_us = 0
        self._is_live = self._stands = False
        self._compared = (0, math.inf)

    def reconnected(self) -> None:
        """What the broker retains comes now: it may have been said long ago."""
        self._is_live = False

    def hear(self, heard_us: int, wall_s: float) -> None:
        """Compare; ``heard_us`` changes when something was heard, ``wall_s`` is this device's Unix time."""
        if heard_us == self._heard_us:
            return
        if self._is_live:
            then_us, then_s = self._compared
            if abs(passed_s := wall_s - then_s) >= _STANDS_S:
                self._stands = math.isfinite(passed_s) and (heard_us - then_us) / 1e6 < passed_s / 2
                self._compared = heard_us, wall_s
            self.ahead_s = 0.0 if self._stands else wall_s - heard_us / 1e6
        self._heard_us, self._is_live = heard_us, True


def waits(facts: Facts) -> tuple[Wait, ...]:
    """Return all that keeps a client from its work, the most important first."""
    found = (*common_waits(facts), *_of_the_device(facts), *_of_the_round(facts))
    implied = {Why.PAUSED, Why.NOT_DUE, Why.BUSY} if facts.excluded or facts.shut_out else set()
    return ordered((wait for wait in found if wait.reason not in implied), PATIENCE)


def _of_the_device(facts: Facts) -> Iterator[Wait]:
    if facts.trust_problem:
        yield Wait(Why.UNTRUSTED, facts.trust_problem)
    elif facts.connected and facts.step is Step.WAIT_AGGREGATOR:
        nobody = "no aggregator announces itself; start it, or see whether --fleet is its fleet"
        yield Wait(Why.NO_AGGREGATOR, f"no aggregator to follow: {facts.ignored}" if facts.ignored else nobody)
    if facts.camera:
        yield Wait(Why.CAMERA, facts.camera)
    if facts.reading_s > SLOW_READ_S:
        yield Wait(
            Why.SAMPLES,
            f"a round's samples have been read for {duration(facts.reading_s)}: does their folder or "
            "its network answer? A model that hangs as it loads holds them up too, for two minutes; serving goes on",
        )
    if facts.sent_away is not None:
        yield _rolled_back(facts, facts.sent_away)
    if abs(facts.clock_ahead_s) > CLOCK_SLACK_S:
        way = "ahead of" if facts.clock_ahead_s > 0 else "behind"
        yield Wait(
            Why.CLOCK_WRONG,
            f"this device's clock is {duration(abs(facts.clock_ahead_s))} {way} the aggregator's; set the one that is "
            "wrong (timedatectl set-ntp true): certificates and logs go by it",
        )


def _of_the_round(facts: Facts) -> Iterator[Wait]:
    if facts.shut_out:
        yield Wait(
            Why.REVOKED,
            f"the aggregator takes nothing from this client: it was never enrolled, or was revoked; `aggregator enroll "
            f"{facts.member}` takes it in, and its new identity folder belongs here; it serves on",
        )
        return
    if facts.excluded:
        text = f"excluded from rounds by an operator; `aggregator readmit {facts.member}` brings it back; it serves on"
        yield Wait(Why.EXCLUDED, text)
        return
    if not facts.trains:
        yield Wait(Why.SERVES_ONLY, "it serves and doesn't train: torch isn't installed, or --no-train was said")
    if facts.training_problem:
        yield Wait(Why.TRAINING_FAILED, f"round {facts.round} wasn't trained: {facts.training_problem}")
    yield from _of_the_upload(facts)
    if facts.step is Step.WAIT_DOWNLOAD:
        why = facts.download_problem or (
            f"`aggregator history --client {facts.member}` says why, also where another device has this --client-id or "
            "this one another signing.key"
        )
        yield Wait(Why.MODELS, f"waits for the models of round {facts.round}; {why}")
    elif facts.step is Step.WAIT_LAST and not facts.download_problem:
        text = "the run is over and its last model didn't come; `aggregator serve` on the same data dir hands it out"
        yield Wait(Why.MODELS, text)
    elif facts.download_problem:
        version = f"version {spoken(facts.serving_version)} serves" if facts.serving_version >= 0 else "none serves"
        yield Wait(Why.MODELS, f"{version}, for no newer model does: {facts.download_problem}")
    if facts.step is Step.WAIT_DATA and not (facts.labels and facts.labels.is_enough):  # soon the source is asked
        yield Wait(Why.TOO_FEW_LABELS, _few_labels(facts.round, facts.labels))


def _of_the_upload(facts: Facts) -> Iterator[Wait]:
    if facts.upload_problem:
        yield Wait(Why.BUSY, f"the aggregator doesn't take the upload yet: {facts.upload_problem}; it is offered again")
    elif facts.connected and facts.upload_silent_s > SILENT_UPLOAD_S:
        yield Wait(
            Why.BUSY,
            f"nothing new of the upload has reached the aggregator for {duration(facts.upload_silent_s)}: others' "
            "may go first; else see whether the line is slow or loses packets, large ones first of all (`edge-client "
            "doctor` tries one); it goes on by itself",
        )


def _rolled_back(facts: Facts, gone: SentAway) -> Wait:
    serves = f"version {spoken(facts.serving_version)}" if facts.serving_version >= 0 else "no model"
    return Wait(
        Why.ROLLED_BACK,
        f"version {spoken(gone.version)} of round {gone.round} was rolled back ({gone.reason}: {gone.detail}); "
        f"{serves} serves until a newer one comes",
    )


def _few_labels(round_index: int, labels: LabelProgress | None) -> str:
    if labels is None:
        return f"its source has no samples for round {round_index}; it is asked again every 5 s"
    pictures = f" from {labels.num_pictures} of {labels.min_pictures} pictures" if labels.min_pictures > 1 else ""
    return (
        f"{labels.num_samples} of {labels.min_samples} labelled samples{pictures} for round {round_index}; label more, "
        "name a --teacher, or ask for less with --min-samples"
    )
