"""Members that take every place for an upload and send nothing: the round closes all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from support.tiny_fleet import TinyClient, TinyFleet

from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.wire.protocol.codec import is_block
from replayfleet.federation.wire.protocol.messages import Manifest
from replayfleet.federation.wire.transport.incoming import TransferLimits

NUM_SQUATTERS = TransferLimits().max_open
HONEST = ("cam-1", "cam-2", "cam-3")


class Squatter(TinyClient):
    """Offers its upload, and another one every second, and never sends a block of it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        publish, self._offered_at, self.num_offers = self.session.publish, -1e9, 0

        def but_blocks(topic: str, payload: bytes, **options: Any) -> None:
            if not is_block(payload):
                publish(topic, payload, **options)

        self.session.publish = but_blocks  # type: ignore[method-assign]
        self.broken = self._another

    def pump(self, now: float) -> None:
        if now - self._offered_at >= 1 and self.announcement is not None:
            self._offered_at, self.uploaded = now, self.announcement.round - 1
        super().pump(now)

    def _another(self, artefacts: Artefacts, draft: Manifest) -> tuple[Artefacts, Manifest]:
        self.num_offers += 1
        return artefacts, msgspec.structs.replace(draft, version=draft.version + self.num_offers)


def test_rounds_close_within_seconds_though_every_place_is_taken(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path, HONEST, num_rounds=None, deadline_s=3600, min_clients=3)
    for number in range(NUM_SQUATTERS):
        name = f"squatter-{number}"
        fleet.clients[name] = Squatter(fleet.broker, name, tmp_path / name)
    late = [fleet.clients.pop(name) for name in HONEST]
    fleet.run(until=lambda: places_taken(fleet) == NUM_SQUATTERS)
    fleet.clients.update(zip(HONEST, late, strict=True))  # who comes now finds no place
    fleet.run(until=lambda: fleet.rounds.index >= 1, for_s=10)
    fleet.kill_aggregator()


def places_taken(fleet: TinyFleet) -> int:
    return len(fleet.service.coordinator._parts.courier._incoming._open)
