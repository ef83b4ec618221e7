"""Which clients are there: the age of their heartbeats decides, never the broker's last will alone."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from replayfleet.federation.wire.protocol.limits import HEARTBEAT_S
from replayfleet.federation.wire.protocol.messages import Presence

DEAD_AFTER_S = 3 * HEARTBEAT_S
"""Silence after which a client counts as gone."""


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


class PresenceTable:
    """The clients heard of since this process started; ``now`` in seconds.

    Attributes:
        members: clients that confirmed or uploaded something once, whether they are there or not.
    """

    def __init__(self, dead_after_s: float = DEAD_AFTER_S) -> None:
        self._dead_after_s = dead_after_s
        self._seen: dict[str, _Seen] = {}
        self.members: frozenset[str] = frozenset()

    @property
    def live(self) -> tuple[str, ...]:
        """Clients that are online and heard of lately, sorted."""
        return tuple(sorted(client for client, seen in self._seen.items() if seen.live))

    def is_live(self, client_id: str) -> bool:
        """Whether a client is online and was heard of lately."""
        seen = self._seen.get(client_id)
        return seen is not None and seen.live

    def last(self, client_id: str) -> Presence | None:
        """The newest presence of a client."""
        seen = self._seen.get(client_id)
        return seen.presence if seen else None

    def ages_s(self, now: float) -> dict[str, float]:
        """Seconds since each client was heard of."""
        return {client: now - seen.heard_at for client, seen in sorted(self._seen.items())}

    def heard(self, presence: Presence, now: float) -> Change:
        """Take a presence message; one that is older than the newest of the same boot changes nothing.

        A last will carries the boot id it was made for, so the late will of an earlier boot is ignored.
        """
        before = self._seen.get(presence.client_id)
        if before is not None and not self._is_news(before.presence, presence):
            return Change.NONE
        live = presence.status == "online"
        self._seen[presence.client_id] = _Seen(presence, now, live)
        was_live = before is not None and before.live
        same_boot = before is not None and before.presence.boot_id == presence.boot_id
        if live and not (was_live and same_boot):
            return Change.ONLINE
        return Change.GONE if was_live and not live else Change.NONE

    def expire(self, now: float) -> list[str]:
        """Mark clients that fell silent as gone; returns those that were live until now."""
        silent = [c for c, seen in self._seen.items() if seen.live and now - seen.heard_at > self._dead_after_s]
        for client in silent:
            self._seen[client].live = False
        return sorted(silent)

    @staticmethod
    def _is_news(old: Presence, new: Presence) -> bool:
        if new.boot_id == old.boot_id:
            return new.sequence > old.sequence or (new.status == "offline" and old.status != "offline")
        return new.status != "offline"
