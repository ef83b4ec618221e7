"""Whose word an aggregator takes: each client's own, signed with the key that it was enrolled with, or came with.

A fleet is open until its first client is enrolled: who comes is taken at its first word, and keeps its name while it
lives. From then on only those count who were enrolled, and nobody who was revoked.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, TypeVar

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.limits import EVERYBODY
from replayfleet.federation.wire.protocol.topics import Address
from replayfleet.federation.wire.transport.seal import Kind, Sealed, Signer

T = TypeVar("T")

MAX_MET = 1024
"""Strangers whose key is remembered until they are members."""
MAX_TURNED_AWAY = 256
"""Clients that are told that nothing which they sign counts."""
OTHER_S = 300.0
"""For so long it is told that another device used a client's name."""


class Pins(Protocol):
    """Keys of members, on disk."""

    def signing_key(self, client_id: str) -> bytes | None:
        """Return a member's public key, 32 bytes."""

    def is_enrolled(self, client_id: str = "") -> bool:
        """Whether this client, or any, was enrolled by an operator."""

    def shut_out(self, client_id: str) -> str:
        """Say why nothing that this client signs counts, though its key may be known; empty if it counts."""

    def pin(self, client_id: str, key: bytes, *, enrolled: bool = True) -> None:
        """Keep a member's key."""


class KeyRing:
    """Implements ``Trust``.

    Args:
        own: signs with the fleet's key, which another of its aggregators has too.
        pins: keys of members.
        lives: whether a client is there now.
        other_device: told a client's name when somebody with another key uses it.
        refused: told a client's name, and why nothing that it signs counts.
        other_fleet: told what another key than this fleet's signed as its announcement.
        is_recorded: whether a word of this fleet's key is one that a process before this one said.
    """

    def __init__(
        self,
        own: Signer,
        pins: Pins,
        lives: Callable[[str], bool],
        other_device: Callable[[str], object] = lambda client: None,
        refused: Callable[[str, str], object] = lambda client, why: None,
        other_fleet: Callable[[Sealed], object] = lambda sealed: None,
        is_recorded: Callable[[Sealed], bool] = lambda sealed: False,
    ) -> None:
        self._own = own
        self._pins = pins
        self._lives = lives
        self._other_device = other_device
        self._refused = refused
        self._other_fleet = other_fleet
        self._is_recorded = is_recorded
        self._met: OrderedDict[str, bytes] = OrderedDict()
        self._turned_away: OrderedDict[str, None] = OrderedDict()
        self._others: OrderedDict[str, float] = OrderedDict()

    def takes(self, address: Address, sealed: Sealed, now: float) -> bool:
        if sealed.key == self._own.public_key:
            self._own.outlive(sealed.time_us)  # retained: devices pass over what is older than this
            # On a client's topics: another aggregator's word to it.
            return address.peer == EVERYBODY and not self._is_recorded(sealed)
        if address.peer == EVERYBODY:
            self._other_fleet(sealed)
            raise MalformedMessage("an announcement that another key than this fleet's signed")
        client, known = address.peer, self._key_of(address.peer)
        if why := self._pins.shut_out(client):
            self._refused(client, why)
            _note(self._turned_away, client, None, MAX_TURNED_AWAY)
            raise MalformedMessage(f"client {client!r} {why}")
        if known == sealed.key:
            self._others.pop(client, None)
            return True
        if known is None and self._pins.is_enrolled():
            raise MalformedMessage(f"client {client!r} isn't enrolled; `aggregator enroll {client}` lets it in")
        greets = address.channel == "state" and sealed.kind is Kind.SAID
        if known is None and not greets:
            return False  # it introduces itself with its presence, on another connection
        if known is not None and (self._pins.is_enrolled(client) or self._lives(client) or not greets):
            self._other_device(client)
            _note(self._others, client, now, MAX_TURNED_AWAY)
            anew = f", then `aggregator revoke {client}` and `aggregator enroll {client}`"
            raise MalformedMessage(
                f"signed with another key than that of client {client!r}; if its disk was lost, stop the one that has "
                f"the former key{anew if self._pins.is_enrolled(client) else ''}"
            )
        _note(self._met, client, sealed.key, MAX_MET)
        return True

    def turned_away(self) -> list[str]:
        """Return clients that were heard of lately, and of which nothing counts."""
        return [client for client in self._turned_away if self._pins.shut_out(client)]

    def other_uses(self, client_id: str, now: float) -> bool:
        """Whether somebody with another key used this name lately, and who it belongs to wasn't heard since."""
        return now - self._others.get(client_id, -math.inf) < OTHER_S

    def keep(self, client_id: str) -> None:
        """This client is a member from now on: its key outlives this process."""
        key = self._met.pop(client_id, None)
        if key is not None and key != self._pins.signing_key(client_id):
            self._pins.pin(client_id, key, enrolled=False)

    def _key_of(self, client_id: str) -> bytes | None:
        if client_id in self._met and self._pins.is_enrolled(client_id):  # meanwhile: an operator's word counts
            del self._met[client_id]
        return self._met.get(client_id) or self._pins.signing_key(client_id)


def _note(kept: OrderedDict[str, T], client: str, value: T, at_most: int) -> None:
    """Remember the clients that came last."""
    kept[client] = value
    kept.move_to_end(client)
    if len(kept) > at_most:
        kept.popitem(last=False)
