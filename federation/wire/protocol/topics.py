"""The topics of a fleet, built and parsed; ids are validated on both ways, for they become file names too.

``replayfleet/v1/<fleet>/clients/<client>/{state,up,down,control,feedback}`` belong to one client,
``replayfleet/v1/<fleet>/{round,down}`` are what all clients share. ``up`` and ``down`` carry offers and blocks,
``control`` what answers them, ``state`` and ``round`` are retained. ``feedback`` is for operators: JSON, as over HTTP.
``replayfleet/v1/<fleet>/clients/<client>/doctor`` is where a client tries the broker; nobody else listens there.
"""

from __future__ import annotations

from dataclasses import dataclass

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.limits import EVERYBODY, check_id

ROOT = "replayfleet/v1"
_CLIENT_CHANNELS = frozenset({"state", "up", "down", "control", "feedback"})
_SHARED_CHANNELS = frozenset({"round", "down"})


@dataclass(frozen=True, slots=True)
class Address:
    """Where a message came from or goes to.

    Attributes:
        fleet: fleet name.
        peer: client id, or ``"*"`` for the topics that all clients share.
        channel: ``state``, ``up``, ``down``, ``control``, ``feedback`` or ``round``.
    """

    fleet: str
    peer: str
    channel: str

    @property
    def carries_blocks(self) -> bool:
        """Whether this is bulk: services move it on a connection of its own, so that it delays no command."""
        return self.channel in {"up", "down"}

    @property
    def topic(self) -> str:
        """The topic's text."""
        if self.peer == EVERYBODY:
            return f"{ROOT}/{self.fleet}/{self.channel}"
        return f"{ROOT}/{self.fleet}/clients/{self.peer}/{self.channel}"


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


def state_topic(fleet: str, client: str) -> str:
    """A client's retained presence."""
    return _client_topic(fleet, client, "state")


def up_topic(fleet: str, client: str) -> str:
    """A client's offers and blocks."""
    return _client_topic(fleet, client, "up")


def down_topic(fleet: str, peer: str) -> str:
    """The aggregator's offers and blocks for one client, or for all with peer ``"*"``."""
    return shared_down_topic(fleet) if peer == EVERYBODY else _client_topic(fleet, peer, "down")


def control_topic(fleet: str, client: str) -> str:
    """Progress, wants, verdicts and reports between one client and the aggregator, both ways."""
    return _client_topic(fleet, client, "control")


def feedback_topic(fleet: str, client: str) -> str:
    """What operators say about frames of one client."""
    return _client_topic(fleet, client, "feedback")


def doctor_topic(fleet: str, client: str) -> str:
    """Where ``edge-client doctor`` talks to itself."""
    return _client_topic(fleet, client, "doctor")


def round_topic(fleet: str) -> str:
    """The aggregator's retained announcement."""
    return Address(check_id(fleet, "fleet"), EVERYBODY, "round").topic


def shared_down_topic(fleet: str) -> str:
    """Offers and blocks of what all clients share."""
    return Address(check_id(fleet, "fleet"), EVERYBODY, "down").topic


@dataclass(frozen=True, slots=True)
class Subscriptions:
    """What one member of the fleet listens to, apart for its two connections."""

    control: tuple[str, ...]
    data: tuple[str, ...]


def aggregator_subscriptions(fleet: str) -> Subscriptions:
    """Every client's state, answers and uploads."""
    base = f"{ROOT}/{check_id(fleet, 'fleet')}/clients/+"
    return Subscriptions(control=(f"{base}/state", f"{base}/control"), data=(f"{base}/up",))


def client_subscriptions(fleet: str, client: str) -> Subscriptions:
    """The rounds, the answers to this client, operators' feedback, and its own and the shared downloads."""
    return Subscriptions(
        control=(round_topic(fleet), control_topic(fleet, client), feedback_topic(fleet, client)),
        data=(shared_down_topic(fleet), down_topic(fleet, client)),
    )


def _client_topic(fleet: str, client: str, channel: str) -> str:
    return Address(check_id(fleet, "fleet"), check_id(client, "client id"), channel).topic
