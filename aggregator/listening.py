"""Whom the aggregator listens to. One that floods is muted at the broker, for what arrives can only be thrown away.

A broker queues what it has for us in one line: behind a flood every other client waits. So each client that is taken in
is subscribed to by its own topics, presences of all by one more. To mute is to end a subscription, and the session with
it, which empties the line.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass

from replayfleet.federation.service.inbox import STRANGERS
from replayfleet.federation.wire.protocol.topics import Subscriptions, aggregator_subscriptions
from replayfleet.federation.wire.transport.interfaces import Links, Session

FIRST_S = 30.0
LONGEST_S = 600.0
"""A client that floods again is muted for twice as long, up to this."""
SETTLE_S = 2.0
"""What was on its way when somebody was muted has arrived by then."""


@dataclass(slots=True)
class _Muted:
    since: float
    for_s: float

    def at(self, now: float) -> bool:
        return now < self.since + self.for_s


class Listening:
    """Keeps the subscriptions of both sessions; ``now`` in seconds.

    Args:
        fleet: fleet name.
        links: the two sessions.
    """

    def __init__(self, fleet: str, links: Links) -> None:
        self._fleet = fleet
        self._links = links
        self._current = Subscriptions((), ())
        self._heard: tuple[frozenset[str], bool] | None = None
        self._muted: dict[str, _Muted] = {}

    def muted(self, now: float) -> list[str]:
        """Clients that aren't listened to now."""
        return sorted(name for name, muted in self._muted.items() if muted.at(now))

    def update(self, clients: Set[str], flooding: Collection[str], now: float) -> dict[str, float]:
        """Listen to those who are taken in, and mute those who flood.

        Args:
            clients: members and newcomers.
            flooding: whose messages were dropped in numbers since the last call.
            now: seconds.

        Returns:
            Who was muted just now, and for how many seconds.
        """
        begun = {}
        for name in flooding:
            target = self._target(name, clients, now)
            if target is not None:
                begun[target] = self._mute(target, now)
        heard = frozenset(client for client in clients if not self._is_muted(client, now))
        newcomers = not self._is_muted(STRANGERS, now)
        if (heard, newcomers) != self._heard:
            self._heard = (heard, newcomers)
            wanted = aggregator_subscriptions(self._fleet, sorted(heard), newcomers=newcomers)
            _switch(self._links.control, self._current.control, wanted.control, discard=bool(begun))
            _switch(self._links.data, self._current.data, wanted.data, discard=bool(begun))
            self._current = wanted
        return begun

    def _target(self, name: str, clients: Set[str], now: float) -> str | None:
        """Whom to mute: the client; if it floods on, it does so by presences, which all come by one subscription."""
        if name != STRANGERS and name not in clients:
            return None
        if not self._is_muted(name, now):
            return name
        if now - self._muted[name].since < SETTLE_S or self._is_muted(STRANGERS, now):
            return None
        return STRANGERS

    def _mute(self, name: str, now: float) -> float:
        before = self._muted.get(name)
        recent = before is not None and now - before.since < before.for_s + LONGEST_S
        for_s = min(2 * before.for_s, LONGEST_S) if before is not None and recent else FIRST_S
        self._muted[name] = _Muted(now, for_s)
        return for_s

    def _is_muted(self, name: str, now: float) -> bool:
        return name in self._muted and self._muted[name].at(now)


def _switch(session: Session, before: tuple[str, ...], after: tuple[str, ...], *, discard: bool) -> None:
    kept = {*after}
    ended = [topic for topic in before if topic not in kept]
    session.subscribe(after)
    if ended:
        session.unsubscribe(ended, discard=discard)
