"""What FedEM's two halves exchange and remember.

Axes: M learners.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Parameters

LEARNER = "task/"

Learners: TypeAlias = tuple[Parameters, ...]
"""M task models."""

Shares: TypeAlias = tuple[float, ...]
"""pi: M shares, non-negative, summing to 1."""


@dataclass(frozen=True, slots=True)
class Download:
    """What a client gets for a round.

    Attributes:
        learners: the task models that all clients share.
        shares: this client's mixture of them.
    """

    learners: Learners
    shares: Shares

    def __post_init__(self) -> None:
        check_shares(self.shares, len(self.learners))

    @property
    def task_parameters(self) -> Parameters:
        """The learner with the largest share, the first one of equals: the nearest that one task model gets."""
        return self.learners[max(range(len(self.shares)), key=self.shares.__getitem__)]

    def pack(self) -> Artefacts:
        """Return ``task/0``, ``task/1``, ..."""
        return Artefacts(_sets(self.learners), {"shares": list(self.shares)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Download:
        """Return the download again."""
        return cls(_learners(artefacts), _shares(artefacts.facts.get("shares"), "shares"))


@dataclass(frozen=True, slots=True)
class Upload:
    """What a client sends after its local round.

    Attributes:
        learners: the locally trained task models.
        shares: its new mixture.
        num_samples: real samples they were trained on in this round.
    """

    learners: Learners
    shares: Shares
    num_samples: int

    def pack(self) -> Artefacts:
        """Return ``task/0``, ``task/1``, ..."""
        return Artefacts(_sets(self.learners), {"shares": list(self.shares), "num_samples": self.num_samples})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> Upload:
        """Return the upload again."""
        return cls(
            _learners(artefacts),
            _shares(artefacts.facts.get("shares"), "shares"),
            packing.whole_number(artefacts.facts.get("num_samples"), "num_samples"),
        )


@dataclass(frozen=True, slots=True)
class AggregatorState:
    """What the aggregator remembers between rounds.

    Attributes:
        learners: the average learners; empty before round 0's end.
        clients: client id -> the shares that it last uploaded.
    """

    learners: Learners = ()
    clients: Mapping[ClientId, Shares] = field(default_factory=dict)

    def pack(self) -> Artefacts:
        """Return ``task/0``, ``task/1``, ..."""
        return Artefacts(_sets(self.learners), {"clients": {c: list(shares) for c, shares in self.clients.items()}})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> AggregatorState:
        """Return the state again."""
        clients = artefacts.facts.get("clients", {})
        return cls(_learners(artefacts), {str(c): _shares(shares, f"shares of {c}") for c, shares in clients.items()})


def uniform_shares(num_learners: int) -> Shares:
    """Return the mixture that a client starts from."""
    return (1 / num_learners,) * num_learners


def check_shares(shares: Shares, num_learners: int) -> None:
    """Raise ValueError unless ``shares`` are ``num_learners`` non-negative numbers that sum to 1 within 1e-5."""
    if len(shares) != num_learners:
        raise ValueError(f"got {len(shares)} shares, expected one for each of {num_learners} learners")
    if not (abs(math.fsum(shares) - 1) <= 1e-5 and min(shares) >= 0):
        raise ValueError(f"shares must be non-negative and sum to 1, got {shares}")


def _sets(learners: Sequence[Parameters]) -> dict[str, Parameters]:
    return {f"{LEARNER}{index}": parameters for index, parameters in enumerate(learners)}


def _learners(artefacts: Artefacts) -> Learners:
    return tuple(packing.required(artefacts, f"{LEARNER}{index}") for index in range(len(artefacts.parameter_sets)))


def _shares(raw: Any, what: str) -> Shares:
    if not isinstance(raw, (list, tuple)) or not all(isinstance(share, float) for share in raw):
        raise ValueError(f"{what} are {raw!r}, expected a list of numbers")
    return tuple(raw)
