"""Which aggregator's word a client takes: decided from values alone."""

from __future__ import annotations

import msgspec

from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.messages import Announcement

log = EventLogger(__name__)

ALIVE_S = 25.0
"""An aggregator that announced so lately still leads; it does so every 10 s."""


class Following:
    """Follows one aggregator, until it restarts, is restored or another one takes over.

    Args:
        fleet: whose words are listened to.
    """

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._heard_at = float("-inf")
        self.word: Announcement | None = None
        self.notice = ""
        self.ignored = ""
        """Why the newest word isn't followed; empty if it is, or none came."""

    def follows(self, said: Announcement, now: float) -> bool:
        """Whether to take what was said, which nobody has forged: the transport saw to that.

        Of two aggregators the one with the higher epoch leads while it lives, and in one epoch rounds only rise. What
        one process said before it said something newer counts as little as the late will of a process that was
        followed by another.
        """
        word = self.word
        if said.spec.fleet != self._fleet:
            return self.ignore(f"announcement of fleet {said.spec.fleet!r}, this is {self._fleet!r}")
        if said.state == "standby" or word is None:
            return said.state != "standby"
        if said.instance == word.instance:
            return said.state == "offline" or (said.epoch, said.round) >= (word.epoch, word.round)
        if said.state == "offline":
            return False
        lives = word.state != "offline" and now - self._heard_at < ALIVE_S
        if lives and (said.epoch, said.round) < (word.epoch, word.round):  # or what was said long ago, said again
            return self.ignore(
                f"a second aggregator announces round {said.round} in epoch {said.epoch}; "
                f"the one of epoch {word.epoch} is followed"
            )
        return True

    def reconnected(self) -> None:
        """The broker was away, perhaps with the aggregator: whoever announces now may lead."""
        self._heard_at = float("-inf")

    def take(self, said: Announcement, now: float) -> None:
        """Follow who said this, and say what became of the one before."""
        before = self.word
        if before is not None and said.state == "offline":  # a will, made when its process began
            self.word = msgspec.structs.replace(before, state="offline")
            return
        self.word, self._heard_at, self.ignored = said, now, ""
        grown = before is not None and said.spec != before.spec  # more classes begin an epoch of their own
        if before is not None and (said.round < before.round or (said.epoch > before.epoch and not grown)):
            self.notice = (
                f"the aggregator was restored to round {said.round}, or another one took over; round {before.round} "
                "was open before; this client goes on from there"
            )
            log.warning("aggregator restored", notice=self.notice, epoch=said.epoch)
        elif before is None or said.round > before.round or grown:
            self.notice = ""

    def ignore(self, why: str) -> bool:
        """Note once why a word isn't followed; returns False."""
        self.ignored = why
        if why != self.notice:
            self.notice = why
            log.error("announcement ignored", reason=why, next="what is served stays")
        return False
