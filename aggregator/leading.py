"""Which aggregator of a fleet leads: decided from announcements alone, with ``now`` in seconds.

One leads, any other stands by. Who begins asks first. The higher epoch wins; between equal ones the one that leads
already. A takeover raises the epoch above all that was announced, so that every client knows which word is newer.
"""

from __future__ import annotations

import enum

from replayfleet.federation.wire.protocol.messages import Announcement

LISTEN_S = 1.0
"""Who begins waits so long for the retained announcement of whoever led before."""
ANSWER_S = 2.0
"""A leader answers a question within this."""
PATIENCE_S = 3.0
"""A leader that said goodbye may be back after a restart; then one that stands by takes over."""
SILENT_S = 25.0
"""A leader announces itself every 10 s; one that was silent for so long is gone."""


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
        self._has_led = False
        self._highest = -1  # epoch in which anybody led, and round that was reached: a last will says
        self._reached = 0  # those of its process's start
        self._since: float | None = None
        self._heard_at = 0.0
        self._gone_at: float | None = None

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
        behind = self._reached - self._place[1]
        then = "takes over when that is gone, or at once with --take-over"
        if self._would_begin_anew:
            then = "holds no round of it and won't take over, but with --take-over; restore a backup into its data dir"
        elif not self._has_led and behind > 0:
            then += f", from round {self._place[1]}: its store is {behind} behind, and a newer backup isn't"
        return (
            f"standing by: another aggregator leads this fleet (epoch {self.rival.epoch}, round {self.rival.round}, "
            f"instance {self.rival.instance}); this one {then}"
        )

    def connected(self, now: float) -> Deed:
        """The broker accepted us (again); what it retains comes now."""
        self._since = now
        return self._lead() if self.standing is Standing.ASKING and not self.must_ask else Deed.NOTHING

    def heard(self, word: Announcement, now: float) -> Deed:
        """Take another aggregator's word, which nobody has forged: the transport saw to that."""
        if word.instance == self.instance:
            return Deed.NOTHING
        if word.state != "standby":
            self._highest, self._reached = max(self._highest, word.epoch), max(self._reached, word.round)
        if self.leads:
            if word.state in {"standby", "offline"} or (word.epoch, word.instance) < (self.epoch, self.instance):
                return Deed.ANSWER  # its word may be the retained one now
            return self._stand_by(word, now)
        if word.state == "standby":
            return Deed.NOTHING
        if self.standing is Standing.STANDING_BY:
            self._stand_by(word, now)
            return Deed.NOTHING
        return self._told_who_led(word, now)

    def tick(self, now: float) -> Deed:
        """Let time pass."""
        if self.standing is Standing.ASKING and self._since is not None:
            answer_s = SILENT_S if self._would_begin_anew else ANSWER_S
            if now - self._since >= (LISTEN_S if self.rival is None else answer_s):
                return self._lead()
        elif self.standing is Standing.STANDING_BY and not self._would_begin_anew:
            gone_s = 0.0 if self._gone_at is None else now - self._gone_at
            if gone_s >= PATIENCE_S or now - self._heard_at >= SILENT_S:
                return self._lead()
        return Deed.NOTHING

    def stand_back(self) -> bool:
        """Our epoch can't be made durable, so nobody would follow: stand by again, if there is a rival; else False."""
        if self.rival is None:
            return False
        self.standing = Standing.STANDING_BY
        return True

    def _told_who_led(self, word: Announcement, now: float) -> Deed:
        if self._is_ours(word):  # an earlier process of this data dir, which is dead: we hold its lock
            ahead = (word.epoch, word.round) > self._place
            self.rival = word if ahead else None  # then the store is older than what was told the fleet
            return self._lead()
        asked, self.rival = self.rival, word
        if self.epoch > word.epoch or self._claim is Claim.TAKE_OVER or word.state == "offline":
            return self._lead()
        if asked is not None and asked.instance == word.instance:
            return self._stand_by(word, now)
        self._since = now
        return Deed.ASK

    @property
    def _would_begin_anew(self) -> bool:
        """Whether all that the fleet learned would be lost: a leader that hangs for a while has still got it."""
        return not self._has_led and self._place[1] == 0 and self._reached > 0

    def _lead(self) -> Deed:
        if self.rival is not None:
            self.epoch = max(self.epoch, self._highest + 1)
        self._has_led = True
        self.standing = Standing.LEADING
        return Deed.LEAD

    def _stand_by(self, word: Announcement, now: float) -> Deed:
        self.standing, self.rival, self._heard_at = Standing.STANDING_BY, word, now
        self._gone_at = None if word.state != "offline" else now if self._gone_at is None else self._gone_at
        return Deed.STAND_BY

    def _is_ours(self, word: Announcement) -> bool:
        return word.instance.startswith(f"{self._home}-")
