"""What pFedGRP's two halves exchange and remember."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias

from replayfleet.federation.methods.kit.packing import (
    COUNT,
    COUNTS,
    OPTIONAL_COUNT,
    SHARE,
    WEIGHTS,
    ByClient,
    Inline,
    OneSet,
    Record,
    SetsByClass,
    SubGenerators,
)
from replayfleet.federation.methods.kit.privacy import ACCOUNT, Account
from replayfleet.federation.methods.kit.records import ClientId, Parameters
from replayfleet.federation.methods.steps.memory import Memory
from replayfleet.federation.methods.steps.serving import CHOICE, Served

LEAST_SHARE = 1 / 32
"""A smaller one is none."""

ClientState: TypeAlias = Memory
"""What a client remembers between rounds."""


@dataclass(frozen=True, slots=True)
class Download(Record):
    """What a client gets for a round.

    Attributes:
        personalised: the task model that the device serves, that filters its replay and that Eq. 2 aligns with.
        average: where local training starts.
        sub_generators: class id (or ``packing.ALL_CLASSES``) -> the client's own, as the aggregator holds it.
        seen: class id -> samples of the client, as the aggregator knows it.
        weights: client id -> share in the personalised model; empty before the first aggregation.
        donors: class id -> another client's sub-generator, with ``warm_start`` only.
        privacy: what the client spent, as it said last; None without DP-SGD.
    """

    personalised: Annotated[Parameters, OneSet(served=True)]
    average: Annotated[Parameters, OneSet()]
    sub_generators: Annotated[Mapping[int, Parameters], SubGenerators()] = field(default_factory=dict)
    seen: Annotated[Mapping[int, int], COUNTS] = field(default_factory=dict)
    weights: Annotated[Mapping[ClientId, float], WEIGHTS] = field(default_factory=dict)
    donors: Annotated[Mapping[int, Parameters], SetsByClass("donor/")] = field(default_factory=dict)
    privacy: Annotated[Account | None, ACCOUNT] = None

    @property
    def task_parameters(self) -> Parameters:
        """The personalised model: what the device serves."""
        return self.personalised


@dataclass(frozen=True, slots=True)
class Upload(Record):
    """What a client sends after its local round.

    Attributes:
        task_parameters: the locally trained task model.
        sub_generators: class id (or ``packing.ALL_CLASSES``) -> those that the aggregator doesn't hold yet.
        seen: class id -> real samples met so far; normalised, it approximates the client's label distribution.
        num_samples: real samples of this round.
        num_updates: sub-generators trained in this round.
        num_filled: replayed samples that the filter didn't recognise.
        privacy: what all sub-generators of the client have cost; None without DP-SGD.
        served: what of the download was chosen to be served; None where nothing was.
    """

    task_parameters: Annotated[Parameters, OneSet("task")]
    sub_generators: Annotated[Mapping[int, Parameters], SubGenerators()]
    seen: Annotated[Mapping[int, int], COUNTS]
    num_samples: Annotated[int, COUNT]
    num_updates: Annotated[int, COUNT] = 0
    num_filled: Annotated[int, COUNT] = 0
    privacy: Annotated[Account | None, ACCOUNT] = None
    served: Annotated[Served | None, CHOICE] = None


@dataclass(frozen=True, slots=True)
class Personalised:
    """A model that a client may serve, and whose models it is mixed of: client id -> share."""

    parameters: Parameters
    weights: Mapping[ClientId, float]


@dataclass(frozen=True, slots=True)
class ClientRecord(Record):
    """What the aggregator holds of one client.

    Attributes:
        task_parameters: the last task model it uploaded.
        sub_generators: class id (or ``packing.ALL_CLASSES``) -> the last one it uploaded.
        seen: class id -> samples, as last uploaded.
        personalised: its latest personalised model.
        weights: client id -> share in ``personalised``.
        privacy: what it spent, as it said last.
        own_share: what of its personalised model is its own task model, before Eq. 3 divides the rest.
        num_missed: rounds since its last upload.
    """

    task_parameters: Annotated[Parameters, OneSet("task")]
    sub_generators: Annotated[Mapping[int, Parameters], SubGenerators()]
    seen: Annotated[Mapping[int, int], COUNTS]
    personalised: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    weights: Annotated[Mapping[ClientId, float], replace(WEIGHTS, name="weights")] = field(default_factory=dict)
    privacy: Annotated[Account | None, ACCOUNT] = None
    own_share: Annotated[float, SHARE] = 0.0
    num_missed: Annotated[int, OPTIONAL_COUNT] = 0

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
            privacy=upload.privacy,
            own_share=_own_share(earlier.own_share if earlier else 0.0, upload.served),
        )

    def personalised_with(self, chosen: Personalised) -> ClientRecord:
        """Return the record with a new personalised model."""
        return replace(self, personalised=chosen.parameters, weights=chosen.weights)


def _own_share(before: float, served: Served | None) -> float:
    """Return what of a client's next mixture is its own model: more if the last one lost to that, else less again."""
    if served is None:
        return before
    share = (1 + before) / 2 if served.lost else before / 2
    return share if share >= LEAST_SHARE else 0.0


@dataclass(frozen=True, slots=True)
class AggregatorState(Record):
    """What the aggregator remembers between rounds: every client's cache, and the average model."""

    clients: Annotated[Mapping[ClientId, ClientRecord], ByClient(part=Inline(kind=ClientRecord))] = field(
        default_factory=dict
    )
    average: Annotated[Parameters, OneSet()] = field(default_factory=dict)
