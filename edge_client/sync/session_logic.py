"""What a client does next, decided from values alone: no sockets, no clock, no files.

The rules are those of ``federation.wire.protocol.messages``:

* round r is trained from the manifest of round r, while r is open, as soon as it is verified: its swap goes on beside;
* an upload is offered until it counts, again whenever the aggregator restarts or turns out not to hold it;
* an upload whose round is over, or was undone, is let go, unless the fleet takes late ones, and it isn't too late; the
  state it came from stays, for the client did learn;
* a client that missed a round goes on with the open one; one that is ahead of a restored aggregator goes back to its.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from replayfleet.federation.wire.protocol.messages import Announcement


class Place(NamedTuple):
    """A round of a run. Rounds of a higher epoch come after all of the lower ones, whatever their numbers."""

    epoch: int
    round: int


NOWHERE = Place(-1, -1)


class Step(str, enum.Enum):
    """What to do; the value is the ``phase`` that presence and ``edge-client status`` show."""

    WAIT_AGGREGATOR = "waiting for the aggregator"
    WAIT_DOWNLOAD = "waiting for the round's models"
    WAIT_LAST = "waiting for the last model of a run that is over"
    WAIT_DATA = "waiting for round data"
    WAIT_DISK = "waiting for the disk"
    WAIT_VERDICT = "waiting for the verdict"
    WAIT_ROUND = "waiting for the next round"
    EXCLUDED = "excluded from rounds"
    PAUSED = "paused with the fleet"
    SERVE_ONLY = "serving only"
    TRAIN = "training"
    TRAINING = "training in progress"
    OFFER = "uploading"
    LET_GO = "letting go of an upload"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Pending:
    """An upload that may count.

    Attributes:
        until: the last round that it may count in: the one it was trained for, where the fleet takes none that is late.
        counts: whether the aggregator has it.
        offered_to: the instance of the aggregator it was last offered to; empty if it never was, or is to be again.
    """

    until: Place
    counts: bool = False
    offered_to: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the next step depends on.

    Attributes:
        announcement: the aggregator's latest word; None before the first.
        held: of the manifest that is verified, served and on disk; None if there is none.
        coming: of the one that is verified and about to be served; None if there is none.
        trained: the latest round whose training is committed.
        training_round: the round that the training process works on; None if it is idle.
        pending: the upload whose round is not over.
        client_id: who asks; an announcement may exclude it.
        trains: False for a device that only serves.
        has_disk: False while the disk takes nothing.
        has_data: False once the source said that it has no samples for the open round.
        abandoned: of the download that training failed on, if it is what the open round would be trained from.
        sent_away: of the download that was rolled back, if none newer is held.
        waited: whether it waits for a round's models already.
    """

    announcement: Announcement | None
    held: Place | None = None
    coming: Place | None = None
    trained: Place = NOWHERE
    training_round: int | None = None
    pending: Pending | None = None
    client_id: str = ""
    trains: bool = True
    has_disk: bool = True
    has_data: bool = True
    abandoned: Place = NOWHERE
    sent_away: Place = NOWHERE
    waited: bool = False


def next_step(now: Situation) -> Step:
    """Return the one thing to do now; ask again after every event."""
    word = now.announcement
    if word is None or word.state == "offline":
        return Step.WAIT_AGGREGATOR if now.training_round is None else Step.TRAINING
    if word.state == "finished":
        return _at_the_end(now, word)
    if now.pending is not None and now.pending.until < open_place(now, word):
        return Step.LET_GO
    if now.training_round is not None or word.leaves_out(now.client_id):
        return Step.EXCLUDED if now.training_round is None else Step.TRAINING
    if now.pending is not None:
        return _until_it_counts(now, now.pending, word)
    return _in_an_open_round(now, word) if word.state == "open" else _while_it_is_aggregated(now, word)


def _while_it_is_aggregated(now: Situation, word: Announcement) -> Step:
    # Whom rounds pass by waits on meanwhile: it never said so where each round was shorter than its patience.
    passed_by = now.waited and open_place(now, word) not in {now.held, now.coming}
    return Step.WAIT_DOWNLOAD if passed_by else Step.WAIT_ROUND


def _until_it_counts(now: Situation, pending: Pending, word: Announcement) -> Step:
    if pending.counts:
        return Step.WAIT_ROUND
    if pending.offered_to == word.instance or word.state != "open":
        return Step.WAIT_VERDICT
    if now.coming == now.trained:  # the aggregator hears what became of that first
        return Step.WAIT_DOWNLOAD
    return Step.OFFER if now.has_disk else Step.WAIT_DISK


def open_place(now: Situation, word: Announcement) -> Place:
    """The announced round. Of two epochs the higher counts: a download may carry what only this client has to know."""
    return Place(max(had.epoch for had in (word, now.held, now.coming) if had is not None), word.round)


def _in_an_open_round(now: Situation, word: Announcement) -> Step:
    here = open_place(now, word)
    if here in {now.trained, now.abandoned}:
        return Step.WAIT_ROUND
    if here not in {now.held, now.coming}:
        return Step.WAIT_ROUND if now.sent_away == here else Step.WAIT_DOWNLOAD
    if here < now.trained:
        return Step.WAIT_DOWNLOAD
    held_up = _held_up(now, word)
    if held_up is not None:
        return held_up
    return Step.TRAIN if now.has_data else Step.WAIT_DATA


def _held_up(now: Situation, word: Announcement) -> Step | None:
    """What keeps a client from training that could begin to."""
    if not now.trains:
        return Step.SERVE_ONLY
    if word.paused:  # by an operator, or for the round isn't due
        return Step.WAIT_ROUND if word.rests_s else Step.PAUSED
    return None if now.has_disk else Step.WAIT_DISK  # what is trained must be kept


def _at_the_end(now: Situation, word: Announcement) -> Step:
    """The run is over once the download of the last aggregation is served, or was rolled back; nothing is uploaded."""
    if now.pending is not None:
        return Step.LET_GO
    newest = max(now.held or NOWHERE, now.sent_away)
    return Step.FINISHED if newest >= open_place(now, word) else Step.WAIT_LAST
