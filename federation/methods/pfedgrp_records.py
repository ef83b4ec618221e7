"""What pFedGRP's two halves exchange and remember."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Parameters
from replayfleet.federation.methods.steps.memory import Memory

ClientState: TypeAlias = Memory
"""What a client remembers between rounds."""

_DONOR = "donor/"


@dataclass(frozen=True, slots=True)
class Download:
    """What a client gets for a round.

    Attributes:
        personalised: the task model that the device serves, that filters its replay and that Eq. 2 aligns with.
        average: where local training starts.
        sub_generators: class id (or ``packing.ALL_CLASSES``) -> the client's own, as the aggregator holds it.
        seen: class id -> samples of the client, as the aggregator knows it.
        weights: client id -> share in the personalised model; empty before the first aggregation.
        donors: class id -> another client's sub-generator, with ``warm_start`` only.
    """

    personalised: Parameters
    average: Parameters
    sub_generators: Mapping[int, Parameters] = field(default_factory=dict)
    seen: Mapping[int, int] = field(default_factory=dict)
    weights: Mapping[ClientId, float] = field(default_factory=dict)
    donors: Mapping[int, Parameters] = field(default_factory=dict)

    @property
    def task_parameters(self) -> Parameters:
        """The personalised model: what the device serves."""
        return self.personalised

    def pack(self) -> Artefacts:
        """Return ``personalised``, ``average``, ``sub-generator/*`` and ``donor/*``."""
        sets = {"personalised": self.personalised, packing.AVERAGE: self.average}
        sets |= packing.named_by_class(self.sub_generators)
        sets |= packing.named_by_class(self.donors, _DONOR)
        return Artefacts(sets, {"seen": packing.counts_to_facts(self.seen), "aggregation_weights": dict(self.weights)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Download:
        """Return the download again."""
        return cls(
            personalised=packing.required(artefacts, "personalised"),
            average=packing.required(artefacts, packing.AVERAGE),
            sub_generators=packing.by_class(artefacts),
            seen=packing.counts_from_facts(artefacts.facts, "seen"),
            weights={str(k): float(v) for k, v in artefacts.facts.get("aggregation_weights", {}).items()},
            donors=packing.by_class(artefacts, _DONOR),
        )


@dataclass(frozen=True, slots=True)
class Upload:
    """What a client sends after its local round.

    Attributes:
        task_parameters: the locally trained task model.
        sub_generators: class id (or ``packing.ALL_CLASSES``) -> those that the aggregator doesn't hold yet.
        seen: class id -> real samples met so far; normalised, it approximates the client's label distribution.
        num_samples: real samples of this round.
        num_updates: sub-generators trained in this round.
        num_filled: replayed samples that the filter didn't recognise.
    """

    task_parameters: Parameters
    sub_generators: Mapping[int, Parameters]
    seen: Mapping[int, int]
    num_samples: int
    num_updates: int = 0
    num_filled: int = 0

    def pack(self) -> Artefacts:
        """Return ``task`` and ``sub-generator/*``."""
        sets = {packing.TASK: self.task_parameters, **packing.named_by_class(self.sub_generators)}
        facts = {
            "seen": packing.counts_to_facts(self.seen),
            "num_samples": self.num_samples,
            "num_updates": self.num_updates,
            "num_filled": self.num_filled,
        }
        return Artefacts(sets, facts)

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Upload:
        """Return the upload again."""
        facts = artefacts.facts
        return cls(
            task_parameters=packing.required(artefacts, packing.TASK),
            sub_generators=packing.by_class(artefacts),
            seen=packing.counts_from_facts(facts, "seen"),
            num_samples=packing.whole_number(facts.get("num_samples"), "num_samples"),
            num_updates=packing.whole_number(facts.get("num_updates"), "num_updates"),
            num_filled=packing.whole_number(facts.get("num_filled"), "num_filled"),
        )


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """What the aggregator holds of one client.

    Attributes:
        task_parameters: the last task model it uploaded.
        sub_generators: class id (or ``packing.ALL_CLASSES``) -> the last one it uploaded.
        seen: class id -> samples, as last uploaded.
        personalised: its latest personalised model.
        weights: client id -> share in ``personalised``.
    """

    task_parameters: Parameters
    sub_generators: Mapping[int, Parameters]
    seen: Mapping[int, int]
    personalised: Parameters = field(default_factory=dict)
    weights: Mapping[ClientId, float] = field(default_factory=dict)

    @classmethod
    def merged(cls, earlier: ClientRecord | None, upload: Upload) -> ClientRecord:
        """Synchronise the cache with an upload (Appendix D, line 18)."""
        held = dict(earlier.sub_generators) if earlier else {}
        return cls(
            task_parameters=upload.task_parameters,
            sub_generators=dict(sorted({**held, **upload.sub_generators}.items())),
            seen=upload.seen,
            personalised=earlier.personalised if earlier else {},
            weights=earlier.weights if earlier else {},
        )

    def personalised_with(self, parameters: Parameters, weights: Mapping[ClientId, float]) -> ClientRecord:
        """Return the record with a new personalised model."""
        return replace(self, personalised=parameters, weights=weights)


@dataclass(frozen=True, slots=True)
class AggregatorState:
    """What the aggregator remembers between rounds: every client's cache, and the average model."""

    clients: Mapping[ClientId, ClientRecord] = field(default_factory=dict)
    average: Parameters = field(default_factory=dict)

    def pack(self) -> Artefacts:
        """Return ``average`` and ``clients/<id>/{task,personalised,sub-generator/*}``."""
        sets: dict[str, Parameters] = {packing.AVERAGE: self.average} if self.average else {}
        facts: dict[str, object] = {}
        for client_id, client in self.clients.items():
            root = f"clients/{client_id}/"
            sets[f"{root}{packing.TASK}"] = client.task_parameters
            sets[f"{root}personalised"] = client.personalised
            sets |= packing.named_by_class(client.sub_generators, f"{root}{packing.SUB_GENERATOR}")
            facts[client_id] = {"seen": packing.counts_to_facts(client.seen), "weights": dict(client.weights)}
        return Artefacts(sets, {"clients": facts})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> AggregatorState:
        """Return the state again."""
        clients: dict[ClientId, ClientRecord] = {}
        for client_id, facts in artefacts.facts.get("clients", {}).items():
            root = f"clients/{client_id}/"
            clients[client_id] = ClientRecord(
                task_parameters=packing.required(artefacts, f"{root}{packing.TASK}"),
                sub_generators=packing.by_class(artefacts, f"{root}{packing.SUB_GENERATOR}"),
                seen=packing.counts_from_facts(facts, "seen"),
                personalised=packing.required(artefacts, f"{root}personalised"),
                weights={str(k): float(v) for k, v in facts["weights"].items()},
            )
        return cls(clients=dict(sorted(clients.items())), average=artefacts.parameter_sets.get(packing.AVERAGE, {}))
