"""What a client's round costs, part by part, CPU seconds and samples times epochs; and how its training went."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from replayfleet.federation.methods.lockstep import InStep, Request, TrainSubGenerators, alone

REST = "rest"
"""What isn't training: drawing replay, judging, packing; of a method that trains by itself, everything."""


@dataclass(slots=True)
class Meter:
    """Counts what one client's round costs, on the thread that runs it.

    Attributes:
        clock: CPU seconds of this thread; with one thread for an operation those are all.
        cpu_s: part -> seconds.
        sample_steps: part -> samples times epochs, where the method says what it trains.
        losses: mean loss of each epoch of the task model's training, in their order; likewise.
    """

    clock: Callable[[], float] = time.thread_time
    cpu_s: dict[str, float] = field(default_factory=dict)
    sample_steps: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    def local_round(self, method: Any, arguments: tuple[Any, ...], sampler: Any) -> tuple[Any, Any]:
        """Return what ``method.local_round`` does."""
        began = self.clock()
        if getattr(type(method), "local_round", None) is InStep.local_round:
            result: tuple[Any, Any] = alone(method.local_work(*arguments, sampler=sampler), answering=self._answered)
        else:
            result = method.local_round(*arguments, sampler=sampler)
        self.cpu_s[REST] = self.clock() - began - sum(self.cpu_s.values())
        return result

    def _answered(self, request: Request) -> Any:
        if not isinstance(request, TrainSubGenerators):
            request = replace(request, optimisation=replace(request.optimisation, watch=self.losses.append))
        began = self.clock()
        answer = request.alone()
        self.cpu_s[request.part] = self.cpu_s.get(request.part, 0.0) + self.clock() - began
        self.sample_steps[request.part] = self.sample_steps.get(request.part, 0) + request.sample_steps
        return answer
