"""What both halves of a courier share: who we are, where to send, what was counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from replayfleet.federation.wire.protocol import topics
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.limits import EVERYBODY
from replayfleet.federation.wire.protocol.messages import Block, Message, Role
from replayfleet.federation.wire.transport.interfaces import Send

COUNTERS = ("bytes_sent", "bytes_received", "blocks_resent", "malformed", "duplicates")


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """What one process is willing to receive; checked on the offer, before anything is allocated.

    Attributes:
        max_bundle_bytes: encoded bytes of one bundle.
        max_blob_bytes: decoded bytes of one blob.
        max_open: transfers being received at a time; more are refused as busy.
        give_up_s: a transfer from which nothing is heard for so long is dropped; its part file stays.
    """

    max_bundle_bytes: int = 256 << 20
    max_blob_bytes: int = 256 << 20
    max_open: int = 64
    give_up_s: float = 600.0


@dataclass(slots=True)
class Wire:
    """One process's end of all links.

    Attributes:
        role: which end.
        fleet: fleet name.
        own_id: a client's id; None for the aggregator.
        send: publishes with QoS 1.
        counters: as ``Courier.counters`` names them.
    """

    role: Role
    fleet: str
    own_id: str | None
    send: Send
    counters: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTERS, 0)))

    def answer(self, peer: str, message: Message) -> None:
        """Send on the control topic of the link to ``peer``; a client answers shared offers on its own."""
        client = self.own_id if self.own_id is not None else peer
        self._publish(topics.control_topic(self.fleet, client), encode(message))

    def bulk(self, peer: str, message: Message | Block) -> int:
        """Send an offer or a block on the link's data topic; returns the bytes on the wire."""
        topic = topics.down_topic(self.fleet, peer)
        if self.own_id is not None:
            topic = topics.up_topic(self.fleet, self.own_id)
        return self._publish(topic, encode(message))

    @property
    def incoming(self) -> tuple[str, str]:
        """The channel that offers arrive on, and the direction that their manifests must have."""
        return ("up", "up") if self.role == "aggregator" else ("down", "down")

    def is_shared(self, peer: str) -> bool:
        """Whether ``peer`` means everybody."""
        return peer == EVERYBODY

    def _publish(self, topic: str, frame: bytes) -> int:
        self.counters["bytes_sent"] += len(frame)
        self.send(topic, frame)
        return len(frame)
