"""The topics of a fleet, built and parsed; ids are validated on both ways, for they become file names too.

``replayfleet/v1/<fleet>/clients/<client>/{state,up,down,control,feedback,studio,thumbnail}`` belong to one client,
``replayfleet/v1/<fleet>/{round,down}`` are what all clients share. ``up`` and ``down`` carry offers and blocks,
``control`` what answers them, ``state`` and ``round`` are retained. ``feedback`` is for operators: JSON, as over HTTP,
or a signed question that ``studio`` answers. ``thumbnail`` brings pictures for the console, where a device allows it.
``replayfleet/v1/<fleet>/clients/<client>/doctor`` is where a client tries the broker; nobody else listens there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.limits import EVERYBODY, check_id

ROOT = "replayfleet/v1"
_CLIENT_CHANNELS = frozenset({"state", "up", "down", "control", "feedback", "studio", "thumbnail"})
_SHARED_CHANNELS = frozenset({"round", "down"})


@dataclass(frozen=True, slots=True)
class Address:
    """Where a message came from.

    Attributes:
        fleet: fleet name.
        peer: client id, or ``"*"`` for the topics that all clients share.
        channel: ``state``, ``up``, ``down``, ``control``, ``feedback``, ``studio``, ``thumbnail`` or ``round``.
    """

    fleet: str
    peer: str
    channel: str


def parse_topic(topic: str) -> Address:
    """Return the parts of a topic.

    Raises:
        MalformedMessage: Not a topic of this protocol.
    """
    match topic.split("/"):
        case ["replayfleet", "v1", fleet, "clients", client, channel] if channel in _CLIENT_CHANNELS:
            return Address(check_id(fleet, "fleet"), check_id(client, "client id"), channel)
        case ["replayfleet", "v1", fleet, channel] if channel in _SHARED_CHANNELS:
            return Address(check_id(fleet, "fleet"), EVERYBODY, channel)
    raise MalformedMessage(f"topic {topic[:200]!r} is not one of {ROOT}/<fleet>/...")


def topic_of(fleet: str, channel: str, peer: str = EVERYBODY) -> str:
    """Return the topic of a client's channel, or of one that all clients share.

    Raises:
        MalformedMessage: A bad id, or a channel that is one client's alone.
    """
    if peer == EVERYBODY and channel in _SHARED_CHANNELS:
        return f"{ROOT}/{check_id(fleet, 'fleet')}/{channel}"
    return f"{ROOT}/{check_id(fleet, 'fleet')}/clients/{check_id(peer, 'client id')}/{channel}"


@dataclass(frozen=True, slots=True)
class Subscriptions:
    """What one member of the fleet listens to, apart for its two connections."""

    control: tuple[str, ...]
    data: tuple[str, ...]


def aggregator_subscriptions(fleet: str, clients: Sequence[str] = ("+",), *, newcomers: bool = True) -> Subscriptions:
    """Clients' states, answers and uploads, and what other aggregators of the fleet announce.

    Args:
        fleet: fleet name.
        clients: whose; ``+`` for everybody's.
        newcomers: states of all clients, whoever they are.
    """
    base = f"{ROOT}/{check_id(fleet, 'fleet')}/clients"
    states = ("+",) if newcomers else clients
    return Subscriptions(
        control=(
            topic_of(fleet, "round"),
            *(f"{base}/{client}/state" for client in states),
            *(f"{base}/{client}/control" for client in clients),
            *(f"{base}/{client}/thumbnail" for client in clients),
        ),
        data=tuple(f"{base}/{client}/up" for client in clients),
    )


def client_subscriptions(fleet: str, client: str) -> Subscriptions:
    """The rounds, the answers to this client, operators' feedback, and its own and the shared downloads."""
    return Subscriptions(
        control=(
            topic_of(fleet, "round"),
            topic_of(fleet, "control", client),
            topic_of(fleet, "feedback", client),
        ),
        data=(topic_of(fleet, "down"), topic_of(fleet, "down", client)),
    )
