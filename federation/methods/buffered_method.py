"""What methods share that train beside a buffer of real samples on the client: DER, A-GEM and FedGP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.steps.kept_samples import Reservoir
from replayfleet.federation.methods.task_method import TaskMethod


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferedMethod(TaskMethod):
    """Settings and plumbing; a method adds its name, its own settings, ``local_round`` and ``aggregate``.

    Attributes:
        buffer_size: real samples that a client keeps.
        buffer_batch_size: of them, how many a step draws.
    """

    stores_data: ClassVar[bool] = True
    ClientState: ClassVar[type[Any]] = Reservoir

    buffer_size: int = 200
    buffer_batch_size: int = 32

    def __post_init__(self) -> None:
        TaskMethod.__post_init__(self)
        checks.at_least(2, self, ["buffer_size", "buffer_batch_size"])

    def initial_states(self) -> tuple[Any, Any]:
        """Return (a client's empty reservoir, the aggregator's empty state)."""
        return Reservoir(self.buffer_size), self.AggregatorState()
