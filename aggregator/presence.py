"""Which clients are there: the age of their heartbeats decides, never the broker's last will alone.

Whoever may publish can make ids up, so an id costs nothing until it is taken in: members always are, of others a few at
a time, until they confirm what they were sent. A newcomer that confirms nothing is a ghost and gives its place up.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from replayfleet.federation.service.quotas import TokenBucket
from replayfleet.federation.wire.protocol.limits import HEARTBEAT_S
from replayfleet.federation.wire.protocol.messages import Presence

DEAD_AFTER_S = 3 * HEARTBEAT_S
"""Silence after which a client counts as gone."""
MIN_ANSWERED = 100
"""Labelled things that a client's accuracy is judged by, at least: at 90 % it is off by 3 points then."""
MAX_NEWCOMERS = 32
"""Clients that never confirmed anything and are provided for at a time."""
GHOST_S = 15.0
"""A newcomer that received nothing new for so long gives its place to one that was turned away."""
MAX_RETURNS = 8
RETURNS_PER_S = 0.2
"""How often a client may come online again: each time it is offered its download, with a first window of blocks."""


class Change(str, enum.Enum):
    """What a presence message or the passing of time changed."""

    NONE = "none"
    ONLINE = "online"
    """The client came online, or restarted: it should be offered its download."""
    GONE = "gone"


@dataclass(slots=True)
class _Seen:
    presence: Presence
    heard_at: float
    live: bool
    since: float
    returns: TokenBucket
    recalled: bool
    """All that came is the broker's memory of its end: when that was nobody says."""


class PresenceTable:
    """The clients heard of since this process started; ``now`` in seconds.

    Attributes:
        members: clients that confirmed or uploaded something once, whether they are there or not.
        num_turned_away: presences of clients that found no place; they are repeated.
        unheard: clients of whom something has come that wasn't looked at yet: these aren't silent.
    """

    def __init__(self, dead_after_s: float = DEAD_AFTER_S) -> None:
        self._dead_after_s = dead_after_s
        self._seen: dict[str, _Seen] = {}
        self.members: frozenset[str] = frozenset()
        self.num_turned_away = 0
        self.unheard: frozenset[str] = frozenset()
        self._told_ghosts_at = 0

    @property
    def live(self) -> tuple[str, ...]:
        """Clients that are online and heard of lately, sorted."""
        return tuple(sorted(client for client, seen in self._seen.items() if seen.live))

    def is_live(self, client_id: str) -> bool:
        """Whether a client is online and was heard of lately."""
        seen = self._seen.get(client_id)
        return seen is not None and seen.live

    def lately(self, now: float) -> tuple[str, ...]:
        """Clients that are live, or whose connection broke a moment ago, which they may have again in the next one."""
        return tuple(
            sorted(
                client
                for client, seen in self._seen.items()
                if seen.live or (seen.presence.status == "offline" and now - seen.heard_at <= self._dead_after_s)
            )
        )

    def last(self, client_id: str) -> Presence | None:
        """The newest presence of a client."""
        seen = self._seen.get(client_id)
        return seen.presence if seen else None

    def age_s(self, client_id: str, now: float) -> float | None:
        """Seconds since a client was heard of; None if it wasn't since the start."""
        seen = self._seen.get(client_id)
        return None if seen is None or seen.recalled else now - seen.heard_at

    def heard_of(self) -> dict[str, tuple[float, bool]]:
        """When each member was heard of, by the loop's clock, and whether it trains."""
        return {
            client: (seen.heard_at, seen.presence.trains)
            for client, seen in self._seen.items()
            if client in self.members and not seen.recalled
        }

    def samples_waiting(self, clients: Iterable[str], round_index: int) -> int:
        """Labelled samples that wait, as those of these live clients say that know the round: earlier ones are used."""
        return sum(max(0, presence.labels_waiting) for presence in self._knowing(clients, round_index))

    def least_accurate(self, clients: Iterable[str], round_index: int) -> tuple[float, str]:
        """The lowest share of labelled things that a client's model answers rightly, and whose it is.

        Of these live clients that know the round and were asked about ``MIN_ANSWERED`` since; (1, "") without one.
        """
        said = [one for one in self._knowing(clients, round_index) if one.labels_answered >= MIN_ANSWERED]
        return min(((one.labels_right / one.labels_answered, one.client_id) for one in said), default=(1.0, ""))

    def _knowing(self, clients: Iterable[str], round_index: int) -> list[Presence]:
        """What those of these live clients say that know the round."""
        said = [seen.presence for client in clients if (seen := self._seen.get(client)) is not None and seen.live]
        return [presence for presence in said if presence.round == round_index]

    @property
    def newcomers(self) -> list[str]:
        """Clients that are taken in and are no members yet."""
        return [client for client in self._seen if client not in self.members]

    def knows(self, client_id: str) -> bool:
        """Whether a client is taken in or a member."""
        return client_id in self._seen or client_id in self.members

    def ghosts(self, advanced_at: Callable[[str], float], now: float) -> list[str]:
        """Return newcomers that are gone, and, if others were turned away, those that get nowhere.

        Args:
            advanced_at: when a client last said that it received something new.
            now: seconds.
        """
        others_wait, self._told_ghosts_at = self.num_turned_away > self._told_ghosts_at, self.num_turned_away
        return [
            client
            for client in self.newcomers
            if not self._seen[client].live
            or (others_wait and now - max(self._seen[client].since, advanced_at(client)) >= GHOST_S)
        ]

    def forget(self, client_id: str) -> None:
        """A client gives its place up."""
        self._seen.pop(client_id, None)

    def heard(self, presence: Presence, now: float) -> Change:
        """Take a presence message; one that is older than the newest of the same boot changes nothing.

        A last will carries the boot id it was made for, so the late will of an earlier boot is ignored.
        """
        client, live = presence.client_id, presence.status == "online"
        before = self._seen.get(client)
        if before is None:
            if client not in self.members and not (live and self._has_room()):
                return Change.NONE
            self._seen[client] = _Seen(presence, now, live, now, TokenBucket(RETURNS_PER_S, MAX_RETURNS), not live)
            return Change.ONLINE if live else Change.NONE
        if not self._is_news(before.presence, presence):
            return Change.NONE
        returns = live and not (before.live and before.presence.boot_id == presence.boot_id)
        if returns and not before.returns.take(1, now):
            return Change.NONE  # as if it was never said; heartbeats repeat it
        was_live, before.presence, before.heard_at, before.live = before.live, presence, now, live
        before.recalled = False
        return Change.ONLINE if returns else Change.GONE if was_live and not live else Change.NONE

    def expire(self, now: float) -> list[str]:
        """Mark clients that fell silent as gone; returns those that were live until now."""
        since = now - self._dead_after_s
        silent = [c for c, seen in self._seen.items() if seen.live and seen.heard_at < since and c not in self.unheard]
        for client in silent:
            self._seen[client].live = False
        return sorted(silent)

    def _has_room(self) -> bool:
        if len(self.newcomers) < MAX_NEWCOMERS:
            return True
        self.num_turned_away += 1
        return False

    @staticmethod
    def _is_news(old: Presence, new: Presence) -> bool:
        if new.boot_id == old.boot_id:
            return new.sequence > old.sequence or (new.status == "offline" and old.status != "offline")
        return new.status != "offline"
