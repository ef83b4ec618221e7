"""What a client does next, decided from values alone: no sockets, no clock, no files.

The rules are those of ``federation.wire.protocol.messages``:

* round r is trained from the manifest of round r, while r is open;
* an upload is offered until it has a verdict, again after every restart of the aggregator (a new epoch);
* an upload of a round that is no longer open is dropped; the state it came from stays, for the client did learn;
* a client that missed a round goes on with the open one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from replayfleet.federation.wire.protocol.messages import Announcement


class Step(str, enum.Enum):
    """What to do; the value is the ``phase`` that presence and ``edge-client status`` show."""

    WAIT_AGGREGATOR = "waiting for the aggregator"
    WAIT_DOWNLOAD = "waiting for the round's models"
    WAIT_DATA = "waiting for round data"
    WAIT_DISK = "waiting for the disk"
    WAIT_VERDICT = "waiting for the verdict"
    WAIT_ROUND = "waiting for the next round"
    TRAIN = "training"
    TRAINING = "training in progress"
    OFFER = "uploading"
    DROP_UPLOAD = "dropping a late upload"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Pending:
    """An upload that waits for its verdict.

    Attributes:
        round: the round it was trained for.
        offered_epoch: the aggregator's epoch it was last offered in; empty if it never was.
    """

    round: int
    offered_epoch: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the next step depends on.

    Attributes:
        announcement: the aggregator's latest word; None before the first.
        held_round: round of the manifest that is verified, served and on disk; None if there is none.
        trained_round: the latest round whose training is committed; -1 if none is.
        training_round: the round that the training process works on; None if it is idle.
        pending: the upload without a verdict.
        has_disk: False while the disk takes nothing.
        has_data: False once the source said that it has no samples for the open round.
        abandoned_round: a round whose training failed too often; -1 if none did.
        sent_away_round: of the download that was rolled back, if none newer is held; -1 if none was.
    """

    announcement: Announcement | None
    held_round: int | None = None
    trained_round: int = -1
    training_round: int | None = None
    pending: Pending | None = None
    has_disk: bool = True
    has_data: bool = True
    abandoned_round: int = -1
    sent_away_round: int = -1


def next_step(now: Situation) -> Step:
    """Return the one thing to do now; ask again after every event."""
    word = now.announcement
    if word is None or word.state == "offline":
        return Step.WAIT_AGGREGATOR if now.training_round is None else Step.TRAINING
    if word.state == "finished":
        return _at_the_end(now, word)
    if now.pending is not None and _is_late(now.pending, word):
        return Step.DROP_UPLOAD
    if now.training_round is not None:
        return Step.TRAINING
    if now.pending is not None:
        must_offer = word.state == "open" and now.pending.offered_epoch != word.epoch
        return (Step.OFFER if now.has_disk else Step.WAIT_DISK) if must_offer else Step.WAIT_VERDICT
    return _in_an_open_round(now, word.round) if word.state == "open" else Step.WAIT_ROUND


def _in_an_open_round(now: Situation, open_round: int) -> Step:
    if open_round <= now.trained_round or open_round == now.abandoned_round:
        return Step.WAIT_ROUND
    if now.held_round != open_round:
        return Step.WAIT_ROUND if now.sent_away_round == open_round else Step.WAIT_DOWNLOAD
    if not now.has_disk:
        return Step.WAIT_DISK  # what is trained must be kept
    return Step.TRAIN if now.has_data else Step.WAIT_DATA


def _at_the_end(now: Situation, word: Announcement) -> Step:
    """The run is over once the download of the last aggregation is served, or was rolled back; nothing is uploaded."""
    if now.pending is not None:
        return Step.DROP_UPLOAD
    newest = max(-1 if now.held_round is None else now.held_round, now.sent_away_round)
    if newest < word.round:
        return Step.WAIT_DOWNLOAD
    return Step.FINISHED


def _is_late(pending: Pending, word: Announcement) -> bool:
    """Whether the round of an upload is over; while it is being aggregated its verdict may still come."""
    return word.round > pending.round
