"""DP-SGD: gradients that hide whether any one sample took part.

Abadi et al. 2016, "Deep Learning with Differential Privacy", Algorithm 1. Each sample takes part in a step with the
same probability, independently (Poisson sampling, which the accountant presupposes); its gradient is clipped to a norm;
to the sum comes Gaussian noise of that norm times a multiplier.

Axes: B batch, N samples, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from replayfleet.federation.methods.kit.pace import steps_per_epoch
from replayfleet.federation.methods.kit.privacy import History, Trained, composed

_MOST_GRADIENTS = 1 << 26
"""Numbers in the gradients of single samples that are held at once: 256 MB."""

Predict: TypeAlias = Callable[..., Any]
"""The network with the parameters that a loss is differentiated by."""

SampleLoss: TypeAlias = Callable[..., Tensor]
"""(predict, what belongs to one sample...) -> its loss, a scalar that no other sample has a part in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DpSgd:
    """How a sub-generator is trained with differential privacy.

    Attributes:
        noise_multiplier: sigma, standard deviation of the noise over ``max_grad_norm``.
        max_grad_norm: C, to which each sample's gradient is clipped.
    """

    noise_multiplier: float
    max_grad_norm: float

    def planned(self, num_samples: int, batch_size: int, num_epochs: int) -> Trained:
        """Return what a training at full length is."""
        num_steps = num_epochs * steps_per_epoch(num_samples, batch_size)
        return Trained(self.noise_multiplier, sample_rate(num_samples, batch_size), num_steps)

    def after(self, history: History, num_samples: int, batch_size: int, num_steps: int) -> History:
        """Return a history after ``num_steps`` steps of ``batch_size`` on these samples."""
        rate = sample_rate(num_samples, batch_size)
        return composed(history, Trained(self.noise_multiplier, rate, num_steps))

    def put_gradients(
        self, module: nn.Module, loss: SampleLoss, samples: tuple[Tensor, ...], batch_size: int, rng: torch.Generator
    ) -> None:
        """Set the gradients of ``module`` to this step's (Algorithm 1, lines 5 to 8).

        Args:
            module: no layer of it may mix samples, as BatchNorm does.
            loss: of one sample.
            samples: tensors of B rows each, what belongs to each sample; B may be 0.
            batch_size: expected B, by which the sum is divided: how many took part is no secret to be told.
            rng: draws the noise, on the CPU.
        """
        parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
        total = self._clipped_sum(module, parameters, loss, samples)
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng).to(parameter.device)
            noisy = total[name] + self.noise_multiplier * self.max_grad_norm * noise
            parameter.grad = noisy / batch_size

    def _clipped_sum(
        self, module: nn.Module, parameters: Mapping[str, Tensor], loss: SampleLoss, samples: tuple[Tensor, ...]
    ) -> dict[str, Tensor]:
        def loss_of_one(own: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
            def predict(*inputs: Tensor) -> Any:
                return functional_call(module, dict(own), inputs)

            return loss(predict, *sample)

        per_sample = vmap(grad(loss_of_one), in_dims=(None, *(0 for _ in samples)), randomness="error")
        at_once = max(1, _MOST_GRADIENTS // max(1, sum(tensor.numel() for tensor in parameters.values())))
        total = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        for chunk in zip(*(tensor.split(at_once) for tensor in samples), strict=True):
            if not len(chunk[0]):
                continue
            gradients = per_sample(parameters, *chunk)
            norms = sum(own.flatten(1).square().sum(dim=1) for own in gradients.values()).sqrt()
            factors = (self.max_grad_norm / norms).clamp(max=1.0)
            # a gradient that overflowed has no direction; NaN in the sum would tell that its sample took part
            factors = torch.where(norms.isfinite(), factors, 0.0)
            for name, own in gradients.items():
                total[name] += torch.einsum("b...,b->...", own.nan_to_num(0.0, 0.0, 0.0), factors)
        return total


def sample_rate(num_samples: int, batch_size: int) -> float:
    """Return with which probability each of ``num_samples`` takes part in a step that expects ``batch_size``.

    Two significant digits, so that an account has few different ones, however a class's samples vary in number.
    """
    return min(1.0, float(f"{batch_size / num_samples:.1e}"))


def batches(
    num_samples: int, batch_size: int, num_epochs: int, rng: torch.Generator, *, private: bool
) -> Iterator[Tensor]:
    """Yield the samples of each step, (B,) indices on the CPU: every sample once an epoch, or by Poisson sampling."""
    for _ in range(num_epochs):
        if not private:
            yield from torch.randperm(num_samples, generator=rng).split(batch_size)
            continue
        rate = sample_rate(num_samples, batch_size)
        for _ in range(steps_per_epoch(num_samples, batch_size)):
            yield (torch.rand(num_samples, generator=rng, dtype=torch.float64) < rate).nonzero().flatten()
