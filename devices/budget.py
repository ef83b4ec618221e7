"""What a board may spend on training, and what a round's training is cut down to so that it ends in time."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainingAllowance:
    """What a board may spend on training; serving comes first.

    Attributes:
        core_share: of the board's cores, (0, 1]; never less than one core.
        memory_bytes: that the training process may hold; None for half of the board's memory.
        core_gflops: float32 GFLOP/s that one core sustains in training: a first guess, until rounds were measured.
        max_temperature_c: of the hottest thermal zone, above which training is slowed; None for the zones' own limits.
        max_power_w: of the board's input, above which training is slowed; None for no limit.
    """

    core_share: float = 0.5
    memory_bytes: int | None = None
    core_gflops: float = 4.0
    max_temperature_c: float | None = None
    max_power_w: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.core_share <= 1:
            raise ValueError(f"core_share is {self.core_share}, expected a number above 0 and at most 1")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(f"memory_bytes is {self.memory_bytes}, expected at least 1 or None")
        for name in ("core_gflops", "max_temperature_c", "max_power_w"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}, expected a number above 0")

    def threads(self, num_cores: int) -> int:
        """Return how many of ``num_cores`` cores training may use, at least one."""
        return max(1, int(self.core_share * num_cores))
