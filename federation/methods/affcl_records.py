"""What AF-FCL's two halves exchange and remember."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from replayfleet.federation.methods.kit.packing import CLASS_IDS, CLIENT_IDS, COUNTS, Inline, OneSet, Record
from replayfleet.federation.methods.kit.records import ClientId, Parameters


@dataclass(frozen=True, slots=True)
class FlowModels(Record):
    """The parameters of both models."""

    task: Annotated[Parameters, OneSet()]
    flow: Annotated[Parameters, OneSet()]


@dataclass(frozen=True, slots=True)
class Upload(Record):
    """What a client sends after its local round.

    Attributes:
        models: the locally trained task model and flow.
        now: class id -> real samples of this round.
    """

    models: Annotated[FlowModels, Inline(kind=FlowModels)]
    now: Annotated[Mapping[int, int], COUNTS]

    @property
    def num_samples(self) -> int:
        return sum(self.now.values())


@dataclass(frozen=True, slots=True)
class Download(Record):
    """The global models.

    Attributes:
        models: what the client starts from, serves, and is reminded of.
        classes: ids of the classes that any client has met; empty before the first aggregation.
    """

    models: Annotated[FlowModels, Inline(kind=FlowModels)]
    classes: Annotated[tuple[int, ...], CLASS_IDS] = ()

    @property
    def task_parameters(self) -> Parameters:
        return self.models.task


@dataclass(frozen=True, slots=True)
class AggregatorState(Record):
    """What the aggregator remembers between rounds.

    Attributes:
        clients: ids of all clients that ever took part, sorted.
        latest: what everybody downloads; None before the first aggregation.
    """

    clients: Annotated[tuple[ClientId, ...], CLIENT_IDS] = ()
    latest: Annotated[Download | None, Inline(kind=Download)] = None
