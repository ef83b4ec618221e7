"""What AF-FCL's two halves exchange and remember."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Parameters
from replayfleet.federation.methods.steps.flow_replay import FlowModels

FLOW = "flow"


@dataclass(frozen=True, slots=True)
class Upload:
    """What a client sends after its local round.

    Attributes:
        models: the locally trained task model and flow.
        now: class id -> real samples of this round.
    """

    models: FlowModels
    now: Mapping[int, int]

    @property
    def num_samples(self) -> int:
        """Real samples that they were trained on in this round."""
        return sum(self.now.values())

    def pack(self) -> Artefacts:
        """Return ``task`` and ``flow``."""
        return Artefacts(_sets(self.models), {"now": packing.counts_to_facts(self.now)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Upload:
        """Return the upload again."""
        return cls(_models(artefacts), packing.counts_from_facts(artefacts.facts, "now"))


@dataclass(frozen=True, slots=True)
class Download:
    """The global models.

    Attributes:
        models: what the client starts from, serves, and is reminded of.
        classes: ids of the classes that any client has met; empty before the first aggregation.
    """

    models: FlowModels
    classes: tuple[int, ...] = ()

    @property
    def task_parameters(self) -> Parameters:
        """The task model that the client serves."""
        return self.models.task

    def pack(self) -> Artefacts:
        """Return ``task`` and ``flow``."""
        return Artefacts(_sets(self.models), {"classes": list(self.classes)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Download:
        """Return the download again."""
        classes = tuple(packing.whole_number(c, "a class id") for c in artefacts.facts.get("classes", []))
        return cls(_models(artefacts), classes)


@dataclass(frozen=True, slots=True)
class AggregatorState:
    """What the aggregator remembers between rounds.

    Attributes:
        clients: ids of all clients that ever took part, sorted.
        latest: what everybody downloads; None before the first aggregation.
    """

    clients: tuple[ClientId, ...] = ()
    latest: Download | None = None

    def pack(self) -> Artefacts:
        """Return ``task`` and ``flow``."""
        packed = self.latest.pack() if self.latest else Artefacts()
        return Artefacts(packed.parameter_sets, {**packed.facts, "clients": list(self.clients)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> AggregatorState:
        """Return the state again."""
        clients = tuple(str(client_id) for client_id in artefacts.facts.get("clients", []))
        return cls(clients, Download.unpack(artefacts) if FLOW in artefacts.parameter_sets else None)


def _sets(models: FlowModels) -> dict[str, Parameters]:
    return {packing.TASK: models.task, FLOW: models.flow}


def _models(artefacts: Artefacts) -> FlowModels:
    return FlowModels(packing.required(artefacts, packing.TASK), packing.required(artefacts, FLOW))
