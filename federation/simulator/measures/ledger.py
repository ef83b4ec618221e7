"""Counts what would travel: a parameter set goes over the network only if the other end doesn't hold its digest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replayfleet.federation.wire.protocol.messages import BlobEntry
from replayfleet.federation.wire.protocol.tensors import digest


class DigestOnly:
    """A blob store that keeps nothing: for naming parameter sets that need not be stored."""

    def put(self, data: bytes) -> str:
        """Return the digest of ``data``."""
        return digest(data)


@dataclass(frozen=True, slots=True)
class Traffic:
    """One transfer.

    Attributes:
        sent: names of the parameter sets that travel.
        num_bytes: of those.
        everything_bytes: of all that were offered.
    """

    sent: tuple[str, ...]
    num_bytes: int
    everything_bytes: int


class Ledger:
    """What each client and the aggregator both hold: the latest version of every set that went either way.

    Attributes:
        held: client id -> ``up/<name>`` or ``down/<name>`` -> digest; plain values, so that a run can be resumed.
    """

    def __init__(self, held: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.held: dict[str, dict[str, str]] = {client: dict(sets) for client, sets in (held or {}).items()}

    def transfer(self, client_id: str, direction: str, offered: Sequence[BlobEntry]) -> Traffic:
        """Count a transfer in ``direction`` (``up`` or ``down``) and remember that both ends hold it now."""
        held = self.held.setdefault(client_id, {})
        known = set(held.values())
        sent = {entry.digest: entry for entry in offered if entry.digest not in known}
        held |= {f"{direction}/{entry.name}": entry.digest for entry in offered}
        return Traffic(
            sent=tuple(entry.name for entry in sent.values()),
            num_bytes=sum(entry.size_bytes for entry in sent.values()),
            everything_bytes=sum(entry.size_bytes for entry in offered),
        )
