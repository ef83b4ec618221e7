"""Which aggregator of a fleet leads: decided from announcements alone, with ``now`` in seconds.

One leads, any other stands by. Who begins listens, then asks. The higher epoch wins; between equal ones the one that
leads already, and of two that took over at once the one that is further. A takeover raises the epoch above all that was
announced, so that every client knows which word is newer.
"""

from __future__ import annotations

import enum

from replayfleet.federation.service.words import count_of
from replayfleet.federation.wire.protocol.messages import Announcement

LISTEN_S = 1.0
"""Who begins listens so long before it decides: a broker hands on what was said while it was away, oldest first."""
ANSWER_S = 2.0
"""A leader answers a question within this."""
GONE_S = 30.0
"""A leader announces itself every 10 s, and may be away for a restart; without a word for so long it is gone."""
BEHIND_S = 1.0
"""So much longer one that stands by waits for each round that it is behind: of several the furthest leads."""
MOST_BEHIND_S = 60.0


class Standing(str, enum.Enum):
    """What an aggregator is to its fleet."""

    ASKING = "asking who leads"
    LEADING = "leading"
    STANDING_BY = "standing by"


class Claim(str, enum.Enum):
    """How an aggregator comes to lead."""

    SOLE = "sole"
    """Nobody else can reach the broker, so there is nobody to ask."""
    ASK = "ask"
    """Only if nobody else does."""
    TAKE_OVER = "take over"
    """Whoever else does."""


class Deed(enum.Enum):
    """What to do about what was heard, or about time that passed."""

    NOTHING = enum.auto()
    ASK = enum.auto()
    ANSWER = enum.auto()
    LEAD = enum.auto()
    STAND_BY = enum.auto()


class Leadership:
    """One aggregator's standing.

    Args:
        home: names the store; instances of its processes begin with it.
        boot: names this process; several may have run on one store, one after another.
        place: (epoch, round) of the store.
        claim: how it comes to lead.

    Attributes:
        epoch: to lead with; higher than the store's if another store was ahead, or led.
        rival: what the other aggregator said last.
    """

    def __init__(self, home: str, boot: str, place: tuple[int, int], claim: Claim = Claim.SOLE) -> None:
        self.instance = f"{home}-{boot}"
        self.standing = Standing.ASKING
        self.rival: Announcement | None = None
        self.epoch = place[0]
        self._home = home
        self._place = place
        self._claim = claim
        self._highest = -1  # epoch in which anybody led, and round that was reached: a last will says
        self._reached = 0  # those of its process's start, so where nothing else was heard it may have been further
        self._heard_alive = False
        self._since: float | None = None  # when the broker accepted us
        self._asked_at: float | None = None
        self._heard_at = 0.0

    @property
    def leads(self) -> bool:
        return self.standing is Standing.LEADING

    @property
    def stands_by(self) -> bool:
        return self.standing is Standing.STANDING_BY

    @property
    def must_ask(self) -> bool:
        """Whether somebody else may lead."""
        return self.standing is Standing.ASKING and self._claim is not Claim.SOLE

    @property
    def gives_way(self) -> bool:
        """Whether it hasn't begun to lead, and won't if somebody else does."""
        return self.must_ask and self._claim is not Claim.TAKE_OVER

    @property
    def yields_to_a_copy(self) -> bool:
        """Whether the one that leads runs on a copy of this very store, which a restore would have made another one."""
        return self.standing is Standing.STANDING_BY and self.rival is not None and self._is_ours(self.rival)

    @property
    def notice(self) -> str:
        """For log and health, while this aggregator doesn't lead; else empty."""
        if self.standing is not Standing.STANDING_BY or self.rival is None:
            return "" if self.leads else self.standing.value
        then = "takes over when that is gone, or at once with --take-over"
        if self._would_begin_anew:
            then = "holds no round of it and won't take over, but with --take-over; restore a backup into its data dir"
        elif self._ended_without_us:
            then = (
                f"is {count_of(self._behind, 'round')} behind, and opens the finished run again with --take-over alone"
            )
        elif self._behind:
            then += f", from round {self._place[1]}: its store is {self._behind} behind, and a newer backup isn't"
        return (
            f"standing by: another aggregator leads this fleet (epoch {self.rival.epoch}, round {self.rival.round}, "
            f"instance {self.rival.instance}); this one {then}"
        )

    def connected(self, now: float) -> Deed:
        """The broker accepted us (again); what it retains, and kept for us, comes now."""
        self._since = now
        return self._lead() if self.standing is Standing.ASKING and not self.must_ask else Deed.NOTHING

    def heard(self, word: Announcement, now: float, round_index: int = 0) -> Deed:
        """Take another aggregator's word, which nobody has forged: the transport saw to that.

        Args:
            word: of any aggregator of the fleet.
            now: s.
            round_index: that this one is in.
        """
        if word.instance == self.instance:
            return Deed.NOTHING
        if word.state != "standby":
            self._highest, self._reached = max(self._highest, word.epoch), max(self._reached, word.round)
            self._heard_alive |= word.state != "offline"
        if self.leads:
            return self._heard_beside(word, now, round_index)
        ours_ended = word.state == "offline" and self._is_ours(word)  # a process before us: no word of who leads
        if word.state == "standby" or (ours_ended and self.rival is not None):
            return Deed.NOTHING
        if self.standing is Standing.STANDING_BY:
            if word.state != "offline":
                self._stand_by(word, now)
            return Deed.NOTHING
        if self._asked_at is None or word.state == "offline":
            self.rival = word
            return Deed.NOTHING
        return self._lead() if self.epoch > word.epoch else self._stand_by(word, now)

    def cut_off(self, now: float) -> None:
        """The broker doesn't accept us: that nobody is heard says nothing."""
        self._heard_at, self._since, self._asked_at = now, None, None

    def tick(self, now: float) -> Deed:
        """Let time pass."""
        if self.standing is Standing.STANDING_BY:
            patience_s = GONE_S + min(MOST_BEHIND_S, BEHIND_S * self._behind)
            gone = now - self._heard_at >= patience_s and not (self._would_begin_anew or self._ended_without_us)
            return self._lead() if gone else Deed.NOTHING
        if self.leads or self._since is None:
            return Deed.NOTHING
        if self._asked_at is None:
            return self._decided(now) if now - self._since >= LISTEN_S else Deed.NOTHING
        # After a power cut, or a crash, the one that led may begin later.
        older = (self._behind or not self._heard_alive) and self.epoch <= self._highest
        answer_s = GONE_S if older else ANSWER_S
        if now - self._asked_at < answer_s:
            return Deed.NOTHING
        return self._stand_by(self.rival, now) if self.rival and older and self._ended_without_us else self._lead()

    def stand_back(self, round_index: int) -> bool:
        """Our epoch can't be made durable, so nobody would follow: stand by again, if there is a rival; else False."""
        if self.rival is None:
            return False
        self.standing, self._place = Standing.STANDING_BY, (self.epoch, round_index)
        return True

    def _decided(self, now: float) -> Deed:
        """Say what follows from the last word before us."""
        word = self.rival
        if word is not None and self._is_ours(word):  # of a process that is dead: we hold its data dir's lock
            ahead = (word.epoch, word.round) > self._place
            self.rival = word if ahead else None  # then the store is older than what was told the fleet
        elif word is not None and self._claim is not Claim.TAKE_OVER:
            self._asked_at = now
            return Deed.ASK
        return self._lead()

    def _heard_beside(self, word: Announcement, now: float, round_index: int) -> Deed:
        if word.state in {"standby", "offline"} or word.epoch < self.epoch:
            return Deed.ANSWER  # its word may be the retained one now
        if word.epoch > self.epoch or (word.round, word.instance) > (round_index, self.instance):
            self._place = self.epoch, round_index
            return self._stand_by(word, now)
        self.rival, self.epoch = word, self.epoch + 1  # both took over: clients know this epoch from the other too
        return Deed.LEAD

    @property
    def _behind(self) -> int:
        """Rounds that the store lacks, as far as anybody knows."""
        return max(0, self._reached - self._place[1])

    @property
    def _would_begin_anew(self) -> bool:
        """Whether all that the fleet learned would be lost: a leader that hangs for a while has still got it."""
        return self._place[1] == 0 and self._reached > 0

    @property
    def _ended_without_us(self) -> bool:
        """Whether the fleet's run is finished, and our store would open it again."""
        return self.rival is not None and self.rival.state == "finished" and self._behind > 0

    def _lead(self) -> Deed:
        if self.rival is not None:
            self.epoch = max(self.epoch, self._highest + 1)
        self.standing = Standing.LEADING
        return Deed.LEAD

    def _stand_by(self, word: Announcement, now: float) -> Deed:
        self.standing, self.rival, self._heard_at = Standing.STANDING_BY, word, now
        return Deed.STAND_BY

    def _is_ours(self, word: Announcement) -> bool:
        return word.instance.startswith(f"{self._home}-")
