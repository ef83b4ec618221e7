"""What methods with networks of their own do with them: judge, and draw mini-batches.

Axes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from replayfleet.federation.methods.kit.records import Judge, Parameters
from replayfleet.federation.methods.steps.task_model import portions


def judge_of(module: nn.Module, parameters: Parameters, num_classes: int) -> Judge:
    """Return a classifier with these parameters as a function: images (B, C, H, W) -> logits (B, K), in eval mode.

    Args:
        module: made on the meta device; its answer is logits, or a tuple whose last element is logits.
        parameters: its parameters and buffers.
        num_classes: K.
    """
    module.eval()
    fixed = dict(parameters)

    def logits_of(images: Tensor) -> Tensor:
        answer = functional_call(module, fixed, (images,))
        logits: Tensor = answer[-1] if isinstance(answer, tuple) else answer
        return logits

    @torch.no_grad()
    def judge(images: Tensor) -> Tensor:
        if len(images) == 0:
            return torch.empty(0, num_classes)
        return torch.cat([logits_of(part) for part in portions(images)])

    return judge


def shuffled_batches(num_samples: int, batch_size: int, num_batches: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield ``num_batches`` tensors of ``batch_size`` indices: passes over the samples, shuffled anew each time.

    Batches are cut from the passes laid end to end, so none is short, however few samples there are.
    """
    queue = torch.empty(0, dtype=torch.int64)
    for _ in range(num_batches):
        while len(queue) < batch_size:
            queue = torch.cat([queue, torch.randperm(num_samples, generator=rng)])
        yield queue[:batch_size]
        queue = queue[batch_size:]


def drawn_from(choices: list[int], count: int, rng: torch.Generator) -> Tensor:
    """Return (count,) int64, each drawn uniformly from ``choices``, which must not be empty."""
    return torch.tensor(choices)[torch.randint(len(choices), (count,), generator=rng)]
