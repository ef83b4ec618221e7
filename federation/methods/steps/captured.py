"""A training step as one launch of a GPU: small networks' kernels end sooner than a CPU starts the next one.

PyTorch records the kernels of a step in a CUDA graph and replays them on other inputs, so what a step does may not hang
on values, only on shapes, and its optimiser has to keep its counters on the GPU (``capturable``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

LOG = logging.getLogger(__name__)

WARM_UPS = 3
"""Steps of a shape that run kernel by kernel first: libraries choose kernels, optimisers make their state."""


def is_capturable(device: torch.device) -> bool:
    """Return whether steps on this device can be recorded."""
    return device.type == "cuda"


class CapturedStep:
    """A step that is recorded once it ran `WARM_UPS` times on inputs of a shape, and replayed from then on.

    Args:
        step: changes what it closes over in place; takes tensors of the same device, returns nothing.
        device: where it computes; on one that can't record it always runs as it is.
    """

    def __init__(self, step: Callable[..., None], device: torch.device) -> None:
        self._step, self._device = step, device
        self._can = is_capturable(device)
        self._seen: Counter[tuple[torch.Size, ...]] = Counter()
        self._recorded: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}

    def __call__(self, *inputs: Tensor) -> None:
        """Take the step."""
        shapes = tuple(one.shape for one in inputs)
        self._seen[shapes] += 1
        if self._can and self._seen[shapes] > WARM_UPS and shapes not in self._recorded:
            self._record(shapes, inputs)
        if shapes not in self._recorded:
            self._as_it_is(inputs)
            return
        graph, held = self._recorded[shapes]
        for mine, given in zip(held, inputs, strict=True):
            mine.copy_(given)
        graph.replay()

    def _as_it_is(self, inputs: tuple[Tensor, ...]) -> None:
        if not self._can:
            self._step(*inputs)
            return
        here, beside = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        beside.wait_stream(here)  # what is recorded later may have no ties to the stream of before
        with torch.cuda.stream(beside):
            self._step(*inputs)
        here.wait_stream(beside)

    def _record(self, shapes: tuple[torch.Size, ...], inputs: tuple[Tensor, ...]) -> None:
        graph, held = torch.cuda.CUDAGraph(), [one.clone() for one in inputs]
        try:
            # Others may use the GPU meanwhile: Ray's and the aggregator's threads.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step(*held)
        except RuntimeError as error:  # an operation that can't be recorded, or memory too little for it
            LOG.warning("a training step can't be recorded, so it runs kernel by kernel: %s", str(error).split("\n")[0])
            self._can = False
        else:
            self._recorded[shapes] = graph, held
