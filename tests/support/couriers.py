"""Couriers over the in-memory broker, with a clock that the test turns."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace

from replayfleet.federation.wire.protocol import topics
from replayfleet.federation.wire.protocol.messages import BlobEntry, Manifest
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.claims import ClaimStore
from replayfleet.federation.wire.transport.courier import FleetCourier
from replayfleet.federation.wire.transport.incoming import TransferLimits
from replayfleet.federation.wire.transport.interfaces import Arrived, Concluded, Event, Failed, Offered, Received
from tests.support.memory_broker import MemoryBroker
from tests.support.voices import Plain

FLEET = "yard"


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0


class End:
    """One process: a session, a courier and a service that accepts everything (unless told otherwise)."""

    def __init__(
        self,
        broker: MemoryBroker,
        clock: Clock,
        root: Path,
        client: str | None = None,
        *,
        credit: int = 8,
        limits: TransferLimits | None = None,
        claims: ClaimStore | None = None,
    ) -> None:
        self.clock = clock
        self.client = client
        self.inbox: deque[tuple[str, bytes]] = deque()
        self.events: list[Event] = []
        self.accepting = True
        self.concluding = True
        self.store = DiskBlobStore(root)
        self.session = broker.session(client or "aggregator", on_message=lambda *message: self.inbox.append(message))
        subscriptions = topics.aggregator_subscriptions(FLEET)
        if client is not None:
            subscriptions = topics.client_subscriptions(FLEET, client)
        self.session.subscribe((*subscriptions.control, *subscriptions.data))
        self.session.start()
        self.courier = FleetCourier(
            "aggregator" if client is None else "client",
            FLEET,
            SimpleNamespace(control=self.session, data=self.session),
            self.store,
            Plain(),
            own_id=client,
            credit=credit,
            limits=limits,
            claims=claims,
        )

    def work(self, limit: int | None = None) -> int:
        """Handle waiting messages, then tick; returns how many were handled."""
        count = 0
        while self.inbox and (limit is None or count < limit):
            self.act(self.courier.handle(*self.inbox.popleft(), self.clock.now))
            count += 1
        self.act(self.courier.tick(self.clock.now))
        return count

    def act(self, events: list[Event]) -> None:
        """What a service does with events."""
        for event in events:
            self.events.append(event)
            if isinstance(event, Offered) and self.accepting:
                self.act(self.courier.accept(event.peer, event.offer, self.clock.now))
            elif isinstance(event, Arrived) and self.concluding:
                self.courier.conclude(event.peer, event.manifest, event.transfer_id, accepted=True)

    def offer(
        self, peer: str, *blobs: bytes, without: tuple[bytes, ...] = (), round_: int = 0, version: int = 1
    ) -> Manifest:
        """Store blobs, and send a manifest of them with a bundle of all but ``without``."""
        digests = [self.store.put(blob) for blob in blobs]
        manifest = a_manifest(
            peer, *blobs, direction="down" if self.client is None else "up", round_=round_, version=version
        )
        missing = [digest for digest, blob in zip(digests, blobs, strict=True) if blob not in without]
        self.courier.send(peer, manifest, missing, self.clock.now)
        return manifest

    @property
    def arrived(self) -> list[Arrived]:
        return [event for event in self.events if isinstance(event, Arrived)]

    @property
    def concluded(self) -> list[Concluded]:
        return [event for event in self.events if isinstance(event, Concluded)]

    @property
    def failed(self) -> list[Failed]:
        return [event for event in self.events if isinstance(event, Failed)]

    @property
    def received(self) -> list[Received]:
        return [event for event in self.events if isinstance(event, Received)]


def a_manifest(
    peer: str, *blobs: bytes, direction: str = "up", round_: int = 0, version: int = 1, shared: bool = False
) -> Manifest:
    """A manifest of these blobs, named in order."""
    import hashlib

    entries = tuple(
        BlobEntry(f"blob/{place}", hashlib.sha256(blob).hexdigest(), len(blob), shared)
        for place, blob in enumerate(blobs)
    )
    return Manifest("down" if direction == "down" else "up", FLEET, peer, round_, version, entries)


def run(clock: Clock, *ends: End, seconds: float = 0.0, step: float = 0.2) -> None:
    """Let all ends work until nothing is left to do, then go on for some seconds of the clock."""
    until = clock.now + seconds
    while True:
        while sum(end.work() for end in ends):
            continue
        if clock.now >= until:
            return
        clock.now += step
