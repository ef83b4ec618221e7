"""What FedGP's two halves exchange, and what its aggregator remembers."""

from __future__ import annotations

from dataclasses import dataclass, field

from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Parameters

GRADIENT = "gradient"
REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Upload:
    """What a client sends after its local round.

    Attributes:
        task_parameters: the locally trained task model.
        num_samples: real samples it was trained on in this round.
        gradient: g_ref^k by parameter name, of the average model that the round started from on samples of the client's
            buffer; empty where the buffer was.
    """

    task_parameters: Parameters
    num_samples: int
    gradient: Parameters = field(default_factory=dict)

    def pack(self) -> Artefacts:
        """Return ``task`` and perhaps ``gradient``."""
        sets = {packing.TASK: self.task_parameters} | ({GRADIENT: self.gradient} if self.gradient else {})
        return Artefacts(sets, {"num_samples": self.num_samples})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Upload:
        """Return the upload again."""
        num_samples = packing.whole_number(artefacts.facts.get("num_samples"), "num_samples")
        gradient = artefacts.parameter_sets.get(GRADIENT, {})
        return cls(packing.required(artefacts, packing.TASK), num_samples, gradient)


@dataclass(frozen=True, slots=True)
class Download:
    """What every client gets for a round.

    Attributes:
        task_parameters: the average model, which the client serves and starts from.
        reference: g_ref by parameter name, which its steps must not work against; empty before there is one.
    """

    task_parameters: Parameters
    reference: Parameters = field(default_factory=dict)

    def pack(self) -> Artefacts:
        """Return ``task`` and perhaps ``reference``."""
        return Artefacts({packing.TASK: self.task_parameters} | ({REFERENCE: self.reference} if self.reference else {}))

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Download:
        """Return the download again."""
        return cls(packing.required(artefacts, packing.TASK), artefacts.parameter_sets.get(REFERENCE, {}))


@dataclass(frozen=True, slots=True)
class AggregatorState:
    """What the aggregator remembers between rounds; it never sees a sample.

    Attributes:
        clients: ids of all clients that ever uploaded, sorted.
        average: the average model of the last round; empty before round 0's end.
        reference: the last g_ref; empty before there was one.
    """

    clients: tuple[ClientId, ...] = ()
    average: Parameters = field(default_factory=dict)
    reference: Parameters = field(default_factory=dict)

    def pack(self) -> Artefacts:
        """Return ``average`` and perhaps ``reference``."""
        sets = {packing.AVERAGE: self.average, REFERENCE: self.reference}
        return Artefacts({name: found for name, found in sets.items() if found}, {"clients": list(self.clients)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> AggregatorState:
        """Return the state again."""
        clients = tuple(str(client_id) for client_id in artefacts.facts.get("clients", []))
        sets = artefacts.parameter_sets
        return cls(clients, sets.get(packing.AVERAGE, {}), sets.get(REFERENCE, {}))
