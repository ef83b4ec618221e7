"""What pFedGraph's two halves exchange and remember."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Facts, Parameters

_INITIAL = "initial"


@dataclass(frozen=True, slots=True)
class Download:
    """What a client gets for a round.

    Attributes:
        task_parameters: its personalised model: what it serves, starts from and is regularised towards.
        weights: client id -> share in that model; empty before the first aggregation and for late joiners.
        is_initial: whether it is the model that round 0 starts from, which the client then sends back once.
    """

    task_parameters: Parameters
    weights: Mapping[ClientId, float] = field(default_factory=dict)
    is_initial: bool = False

    def pack(self) -> Artefacts:
        """Return ``task``."""
        facts = {"aggregation_weights": dict(self.weights), "is_initial": self.is_initial}
        return Artefacts({packing.TASK: self.task_parameters}, facts)

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Download:
        """Return the download again."""
        is_initial = artefacts.facts.get("is_initial")
        if not isinstance(is_initial, bool):
            raise ValueError(f"is_initial is {is_initial!r}, expected true or false")
        return cls(packing.required(artefacts, packing.TASK), _shares(artefacts.facts), is_initial)


@dataclass(frozen=True, slots=True)
class Upload:
    """What a client sends after its local round.

    Attributes:
        task_parameters: the locally trained task model.
        num_samples: real samples it was trained on in this round.
        initial: the model that round 0 starts from, if the client's training began there; else empty. The aggregator
            made that model, so it holds the blob already and the set costs a line in the manifest.
    """

    task_parameters: Parameters
    num_samples: int
    initial: Parameters = field(default_factory=dict)

    def pack(self) -> Artefacts:
        """Return ``task`` and perhaps ``initial``."""
        sets = {packing.TASK: self.task_parameters}
        if self.initial:
            sets[_INITIAL] = self.initial
        return Artefacts(sets, {"num_samples": self.num_samples})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Upload:
        """Return the upload again."""
        num_samples = packing.whole_number(artefacts.facts.get("num_samples"), "num_samples")
        initial = artefacts.parameter_sets.get(_INITIAL, {})
        return cls(packing.required(artefacts, packing.TASK), num_samples, initial)


@dataclass(frozen=True, slots=True)
class AggregatorState:
    """What the aggregator remembers between rounds.

    Attributes:
        clients: client id -> its latest download.
        common: the plain average of the last round, for clients that nobody heard of yet; empty before round 0's end.
        initial: the model that round 0 started from, the origin of all later cosines; empty before round 0's end.
    """

    clients: Mapping[ClientId, Download] = field(default_factory=dict)
    common: Parameters = field(default_factory=dict)
    initial: Parameters = field(default_factory=dict)

    def pack(self) -> Artefacts:
        """Return ``average``, ``initial`` and ``clients/<id>/task``."""
        sets: dict[str, Parameters] = {
            f"clients/{c}/{packing.TASK}": d.task_parameters for c, d in self.clients.items()
        }
        sets |= {packing.AVERAGE: self.common} if self.common else {}
        sets |= {_INITIAL: self.initial} if self.initial else {}
        weights = {client_id: dict(download.weights) for client_id, download in self.clients.items()}
        return Artefacts(sets, {"clients": weights})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> AggregatorState:
        """Return the state again."""
        clients = {
            str(client_id): Download(
                packing.required(artefacts, f"clients/{client_id}/{packing.TASK}"),
                _shares({"aggregation_weights": weights}),
            )
            for client_id, weights in artefacts.facts.get("clients", {}).items()
        }
        sets = artefacts.parameter_sets
        return cls(clients, sets.get(packing.AVERAGE, {}), sets.get(_INITIAL, {}))


def _shares(facts: Facts) -> dict[ClientId, float]:
    raw = facts.get("aggregation_weights")
    if not isinstance(raw, Mapping):
        raise ValueError(f"aggregation_weights are {type(raw).__name__}, expected a map from client id to share")
    shares = {str(client_id): float(share) for client_id, share in raw.items()}
    if not all(math.isfinite(share) and share >= 0 for share in shares.values()):
        raise ValueError("aggregation_weights hold a negative or infinite share")
    return shares
