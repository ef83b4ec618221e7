"""Gradients as flat vectors, and what is left of one when it may not work against another (A-GEM, FedGP).

Axes: P parameters of a module, all of them laid end to end.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.precision import computing_in
from replayfleet.federation.methods.steps.task_model import loss_of, trainable_task_model
from replayfleet.models.build import build_task_model
from replayfleet.models.specs import AnyTaskSpec


def project_conflicting(gradient: Tensor, reference: Tensor) -> Tensor:
    """Return ``g - <g, ref> / <ref, ref> ref`` if ``<g, ref> < 0``, else ``gradient`` itself.

    Dai et al. 2023, "FedGP", Eq. 4, after Chaudhry et al. 2019, "A-GEM", Eq. 11. To first order, a step along minus the
    result never increases the loss whose gradient ``reference`` is. The arithmetic is float64, whatever the dtypes, on
    a reference that is scaled to a largest entry of 1, so neither tiny nor huge vectors lose the direction.

    A reference that names no direction, because it is all zeros or has an entry that is NaN or infinite, leaves the
    gradient as it is. So does a gradient with such an entry: a model that diverged shows it in its own numbers, and no
    projection hides it.

    Args:
        gradient: (P,) floating point; left untouched.
        reference: (P,) floating point, on the same torch device.

    Returns:
        (P,) with the gradient's dtype and torch device.

    Raises:
        ValueError: One of them isn't a vector, or their lengths differ.
    """
    if gradient.ndim != 1 or gradient.shape != reference.shape:
        raise ValueError(
            f"gradient is {tuple(gradient.shape)} and reference {tuple(reference.shape)}, expected two vectors (P,)"
        )
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    if not 0 < largest < torch.inf:
        return gradient
    direction = reference.to(torch.float64) / largest
    wide = gradient.to(torch.float64)
    product = torch.dot(wide, direction)
    if not -torch.inf < float(product) < 0:
        return gradient
    # FedGP's Eq. 4, A-GEM's Eq. 11
    return (wide - product / torch.dot(direction, direction) * direction).to(gradient.dtype)


def flat_gradient(module: nn.Module) -> Tensor:
    """Return (P,), the gradients of a module's parameters in their order; zeros where a parameter has none."""
    return torch.cat(
        [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).reshape(-1)
            for parameter in module.parameters()
        ]
    )


def project_gradient(module: nn.Module, reference: Tensor) -> None:
    """Replace a module's gradients by ``project_conflicting`` of them, all parameters as one vector.

    Args:
        module: after ``backward``; changed in place, and not at all where nothing conflicts.
        reference: (P,), as ``flat_gradient`` lays gradients out.
    """
    gradient = flat_gradient(module)
    projected = project_conflicting(gradient, reference)
    if projected is gradient:
        return
    parameters = list(module.parameters())
    pieces = projected.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        shaped = piece.view(parameter.shape)
        parameter.grad = shaped.clone() if parameter.grad is None else parameter.grad.copy_(shaped)


def loss_gradient(spec: AnyTaskSpec, module: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the gradient of the task's loss on a batch, by parameter name; the module's own gradients stay.

    Args:
        spec: the task.
        module: in whatever mode it is; in training mode, BatchNorm takes the batch's statistics and remembers them.
        images: (B, C, H, W).
        labels: (B, ...), as the task's loss takes them.
    """
    named = dict(module.named_parameters())
    loss = loss_of(spec, module, images, labels)
    gradients = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return dict(zip(named, gradients, strict=True))


def gradient_at(
    spec: AnyTaskSpec, parameters: Parameters, images: Tensor, labels: Tensor, precision: str
) -> dict[str, Tensor]:
    """Return the gradient of the task's loss on a batch for a task model with these parameters, in training mode.

    FedGP, Algorithm 3 (``ComputeBufferGrad``). Nothing is trained, and ``parameters`` stay untouched.

    Returns:
        Parameter name -> gradient, detached; BatchNorm's statistics have none.
    """
    module = trainable_task_model(spec, parameters)
    with computing_in(precision, images.device):
        gradient = loss_gradient(spec, module, images, labels)
    return {name: tensor.detach().contiguous() for name, tensor in gradient.items()}


def joined(gradient: Parameters, names: Iterable[str]) -> Tensor:
    """Return (P,), a gradient by parameter name laid end to end in the order of ``names``.

    What travelled has lost its order; ``gradient_layout`` and ``flat_gradient`` have the module's.
    """
    return torch.cat([gradient[name].reshape(-1) for name in names])


def gradient_layout(spec: AnyTaskSpec) -> Parameters:
    """Return the layout of a gradient by parameter name, in the module's order, on the meta device."""
    module = build_task_model(spec, device="meta")
    return {name: parameter.detach() for name, parameter in module.named_parameters()}
