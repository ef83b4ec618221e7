"""What FedEM's two halves exchange and remember.

Axes: M learners.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, TypeAlias

from replayfleet.federation.methods.kit.packing import COUNT, ByClient, Fact, OneSet, Record, SetsByClass
from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Parameters

Learners: TypeAlias = tuple[Parameters, ...]
"""M task models."""

Shares: TypeAlias = tuple[float, ...]
"""pi: M shares, non-negative, summing to 1."""


@dataclass(frozen=True, slots=True)
class _InOrder(SetsByClass):
    """``task/0``, ``task/1`` and so on, without a gap."""

    name: str = "task/"

    def pack(self, value: Any, name: str) -> Artefacts:
        return SetsByClass.pack(self, dict(enumerate(value)), name)

    def unpack(self, artefacts: Artefacts, name: str, default: Any) -> Learners:
        found = SetsByClass.unpack(self, artefacts, name, default)
        count = max(len(found), 1 if default is MISSING else 0)
        return tuple(OneSet().unpack(artefacts, f"{name}{index}", MISSING) for index in range(count))


def _shares(raw: Any, name: str) -> Shares:
    if not isinstance(raw, (list, tuple)) or not all(isinstance(share, float) for share in raw):
        raise ValueError(f"{name} are {raw!r}, expected a list of numbers")
    return tuple(raw)


LEARNERS = _InOrder()
SHARES = Fact("shares", _shares, list)


@dataclass(frozen=True, slots=True)
class Download(Record):
    """What a client gets for a round.

    Attributes:
        learners: the task models that all clients share.
        shares: this client's mixture of them.
    """

    learners: Annotated[Learners, LEARNERS]
    shares: Annotated[Shares, SHARES]

    def __post_init__(self) -> None:
        check_shares(self.shares, len(self.learners))

    @property
    def task_parameters(self) -> Parameters:
        """The learner with the largest share, the first one of equals: the nearest that one task model gets."""
        return self.learners[max(range(len(self.shares)), key=self.shares.__getitem__)]


@dataclass(frozen=True, slots=True)
class Upload(Record):
    """What a client sends after its local round.

    Attributes:
        learners: the locally trained task models.
        shares: its new mixture.
        num_samples: real samples they were trained on in this round.
    """

    learners: Annotated[Learners, LEARNERS]
    shares: Annotated[Shares, SHARES]
    num_samples: Annotated[int, COUNT]


@dataclass(frozen=True, slots=True)
class AggregatorState(Record):
    """What the aggregator remembers between rounds.

    Attributes:
        learners: the average learners; empty before round 0's end.
        clients: client id -> the shares that it last uploaded.
    """

    learners: Annotated[Learners, LEARNERS] = ()
    clients: Annotated[Mapping[ClientId, Shares], ByClient(part=SHARES)] = field(default_factory=dict)


def uniform_shares(num_learners: int) -> Shares:
    """Return the mixture that a client starts from."""
    return (1 / num_learners,) * num_learners


def check_shares(shares: Shares, num_learners: int) -> None:
    """Raise ValueError unless ``shares`` are ``num_learners`` non-negative numbers that sum to 1 within 1e-5."""
    if len(shares) != num_learners:
        raise ValueError(f"got {len(shares)} shares, expected one for each of {num_learners} learners")
    if not (abs(math.fsum(shares) - 1) <= 1e-5 and min(shares) >= 0):
        raise ValueError(f"shares must be non-negative and sum to 1, got {shares}")
