"""What FedCIL's two halves exchange and remember."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Parameters
from replayfleet.federation.methods.steps.acgan import Acgan

GENERATOR = "generator"
CRITIC = "critic"


@dataclass(frozen=True, slots=True)
class Upload:
    """What a client sends after its local round.

    Attributes:
        gan: the locally trained ACGAN.
        now: class id -> real samples of this round.
        seen: class id -> real samples met so far, this round's included.
    """

    gan: Acgan
    now: Mapping[int, int]
    seen: Mapping[int, int]

    @property
    def num_samples(self) -> int:
        """Real samples that it was trained on in this round."""
        return sum(self.now.values())

    def pack(self) -> Artefacts:
        """Return ``generator`` and ``critic``."""
        facts = {"now": packing.counts_to_facts(self.now), "seen": packing.counts_to_facts(self.seen)}
        return Artefacts({GENERATOR: self.gan.generator, CRITIC: self.gan.critic}, facts)

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Upload:
        """Return the upload again."""
        return cls(
            Acgan(packing.required(artefacts, GENERATOR), packing.required(artefacts, CRITIC)),
            packing.counts_from_facts(artefacts.facts, "now"),
            packing.counts_from_facts(artefacts.facts, "seen"),
        )


@dataclass(frozen=True, slots=True)
class Download:
    """The global ACGAN.

    Attributes:
        gan: what the client serves, starts from and learns consistency with.
        classes: ids of the classes that any client has met; empty before the first aggregation.
    """

    gan: Acgan
    classes: tuple[int, ...] = ()

    @property
    def task_parameters(self) -> Parameters:
        """The critic, whose class head is the task model."""
        return self.gan.critic

    def pack(self) -> Artefacts:
        """Return ``generator`` and ``critic``."""
        return Artefacts({GENERATOR: self.gan.generator, CRITIC: self.gan.critic}, {"classes": list(self.classes)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Download:
        """Return the download again."""
        classes = tuple(packing.whole_number(c, "a class id") for c in artefacts.facts.get("classes", []))
        return cls(Acgan(packing.required(artefacts, GENERATOR), packing.required(artefacts, CRITIC)), classes)


@dataclass(frozen=True, slots=True)
class Learnt:
    """A client's generator after a round, and what it knows: the client's state, and what the aggregator holds of it.

    Attributes:
        generator: replays the classes of ``seen``; empty before the first round.
        seen: class id -> real samples met up to and including that round.
    """

    generator: Parameters = field(default_factory=dict)
    seen: Mapping[int, int] = field(default_factory=dict)

    def pack(self) -> Artefacts:
        """Return ``generator``."""
        sets = {GENERATOR: self.generator} if self.generator else {}
        return Artefacts(sets, {"seen": packing.counts_to_facts(self.seen)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Learnt:
        """Return the state again."""
        return cls(artefacts.parameter_sets.get(GENERATOR, {}), packing.counts_from_facts(artefacts.facts, "seen"))


@dataclass(frozen=True, slots=True)
class AggregatorState:
    """What the aggregator remembers between rounds.

    Attributes:
        clients: client id -> its generator of the last round that it took part in.
        latest: what everybody downloads; None before the first aggregation.
    """

    clients: Mapping[ClientId, Learnt] = field(default_factory=dict)
    latest: Download | None = None

    def pack(self) -> Artefacts:
        """Return ``generator``, ``critic`` and ``clients/<id>/generator``."""
        packed = self.latest.pack() if self.latest else Artefacts()
        sets = {f"clients/{client_id}/{GENERATOR}": learnt.generator for client_id, learnt in self.clients.items()}
        seen = {client_id: packing.counts_to_facts(learnt.seen) for client_id, learnt in self.clients.items()}
        return Artefacts({**packed.parameter_sets, **sets}, {**packed.facts, "clients": seen})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> AggregatorState:
        """Return the state again."""
        seen = artefacts.facts.get("clients", {})
        clients = {
            client_id: Learnt(
                packing.required(artefacts, f"clients/{client_id}/{GENERATOR}"),
                packing.counts_from_facts(seen, client_id),
            )
            for client_id in sorted(seen)
        }
        return cls(clients, Download.unpack(artefacts) if GENERATOR in artefacts.parameter_sets else None)
