"""What FedCIL's two halves exchange and remember."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from replayfleet.federation.methods.fedcil_gan import Acgan
from replayfleet.federation.methods.kit.packing import CLASS_IDS, COUNTS, ByClient, Inline, OneSet, Record
from replayfleet.federation.methods.kit.records import ClientId, Parameters


@dataclass(frozen=True, slots=True)
class Upload(Record):
    """What a client sends after its local round.

    Attributes:
        gan: the locally trained ACGAN.
        now: class id -> real samples of this round.
        seen: class id -> real samples met so far, this round's included.
    """

    gan: Annotated[Acgan, Inline(kind=Acgan)]
    now: Annotated[Mapping[int, int], COUNTS]
    seen: Annotated[Mapping[int, int], COUNTS]

    @property
    def num_samples(self) -> int:
        return sum(self.now.values())


@dataclass(frozen=True, slots=True)
class Download(Record):
    """The global ACGAN.

    Attributes:
        gan: what the client serves, starts from and learns consistency with.
        classes: ids of the classes that any client has met; empty before the first aggregation.
    """

    gan: Annotated[Acgan, Inline(kind=Acgan)]
    classes: Annotated[tuple[int, ...], CLASS_IDS] = ()

    @property
    def task_parameters(self) -> Parameters:
        """The critic, whose class head is the task model."""
        return self.gan.critic


@dataclass(frozen=True, slots=True)
class Learnt(Record):
    """A client's generator after a round, and what it knows: the client's state, and what the aggregator holds of it.

    Attributes:
        generator: replays the classes of ``seen``; empty before the first round.
        seen: class id -> real samples met up to and including that round.
    """

    generator: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    seen: Annotated[Mapping[int, int], COUNTS] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AggregatorState(Record):
    """What the aggregator remembers between rounds.

    Attributes:
        clients: client id -> its generator of the last round that it took part in.
        latest: what everybody downloads; None before the first aggregation.
    """

    clients: Annotated[Mapping[ClientId, Learnt], ByClient(part=Inline(kind=Learnt))] = field(default_factory=dict)
    latest: Annotated[Download | None, Inline(kind=Download)] = None
