"""What clients want their served models to compute in, and which of them refused it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from replayfleet.aggregator.presence import PresenceTable
from replayfleet.devices.profiles import FP32
from replayfleet.federation.wire.protocol.messages import Manifest


@dataclass(frozen=True, slots=True)
class Wish:
    """What one client wants.

    Attributes:
        precision: as the client says it; anything but float32.
        refused: why it gets none all the same; empty unless it refused one.
    """

    precision: str
    refused: str = ""


class Wishes:
    """Of all clients; for as long as this process lives.

    Args:
        presence: in which clients say what they want.
    """

    def __init__(self, presence: PresenceTable) -> None:
        self._presence = presence
        self._refused: dict[tuple[str, str], Wish] = {}

    def of(self, former: Mapping[str, Manifest | None]) -> dict[str, Wish]:
        """Return what those of these clients want that don't want float32.

        Args:
            former: client -> its newest download; who wasn't heard of since the start wants what that is.
        """
        found = {}
        for client_id, manifest in former.items():
            precision = self._precision(client_id, manifest)
            if precision != FP32:
                found[client_id] = self._refused.get((client_id, precision), Wish(precision))
        return found

    def refuse(self, manifest: Manifest, why: str) -> bool:
        """A client can't serve this download; returns whether a rounded model may be why, so that float32 is next."""
        serving = manifest.serving
        if serving is None or serving.precision == FP32:
            return False
        told = f"this device refused {serving.precision}: {why}"
        self._refused[manifest.client_id, serving.precision] = Wish(serving.precision, told)
        return True

    def _precision(self, client_id: str, manifest: Manifest | None) -> str:
        said = self._presence.last(client_id)
        if said is not None:
            return said.precision or FP32
        return FP32 if manifest is None or manifest.serving is None else manifest.serving.precision
