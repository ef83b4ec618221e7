"""FedCurv: FedAvg whose clients are held to what the others' models need, each parameter by its Fisher information.

Shoham et al. 2019, "Overcoming Forgetting in Federated Learning on Non-IID Data", Eq. 3 and section 3.2. A client sends
the diagonal of its Fisher information beside its task model; what the others' terms sum to comes with the average.
Differences from the paper: ``docs/methods/fedcurv.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from replayfleet.federation.methods import fedcurv_records as curv
from replayfleet.federation.methods.fedcurv_records import Terms
from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import ClientId, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import NoState
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.steps.projection import gradient_layout, loss_gradient
from replayfleet.federation.methods.steps.task_model import loss_of
from replayfleet.federation.methods.task_method import TaskMethod, in_order_with_shares
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import AnyTaskSpec


def diagonal_fisher(
    task: AnyTaskSpec, parameters: Parameters, images: Tensor, labels: Tensor, batch_size: int
) -> dict[str, Tensor]:
    """Return diag(I) by parameter name: squared gradients of the loss, averaged over all batches.

    The loss is the negative log likelihood of the labels; a batch of one sample gives the empirical Fisher information,
    larger ones a cheaper estimate that is smaller where samples disagree. The model is in eval mode.

    Args:
        task: of the model.
        parameters: where the gradient is taken; left untouched.
        images: (B, C, H, W).
        labels: (B, ...), as the task's loss takes them.
        batch_size: samples of one gradient; those of the last are fewer, and it counts for as many.
    """
    module = build_task_model(task, device="meta")
    module.load_state_dict({name: tensor.clone() for name, tensor in parameters.items()}, assign=True)
    module.requires_grad_(True).eval()
    total = {name: torch.zeros_like(parameter) for name, parameter in module.named_parameters()}
    for batch in torch.arange(len(images), device=images.device).split(batch_size):
        share = len(batch) / len(images)
        for name, gradient in loss_gradient(task, module, images[batch], labels[batch]).items():
            total[name] = total[name] + share * gradient.square()
    return {name: tensor.detach() for name, tensor in total.items()}


def curvature_penalty(module: nn.Module, weights: Parameters, targets: Parameters) -> Tensor:
    """Return sum over the others of (w - theta_j)^T diag(I_j) (w - theta_j), less what doesn't depend on w (Eq. 3).

    Args:
        module: has the parameters w.
        weights: u, the sum of diag(I_j).
        targets: v, the sum of diag(I_j) theta_j.

    Returns:
        Scalar, ``sum(u w^2 - 2 v w)``.
    """
    parts = [
        (weights[name] * parameter.square() - 2 * targets[name] * parameter).sum()
        for name, parameter in module.named_parameters()
    ]
    return torch.stack(parts).sum()


def pull(
    weights: Parameters, targets: Parameters, importance: float, learning_rate: float
) -> Callable[[nn.Module], Tensor] | None:
    """Return lambda ``curvature_penalty`` of a module, or None where there is nobody to be held to.

    A step of SGD changes w by ``2 lambda learning_rate u`` of its distance to v / u. Where that is more than 1 the
    client would diverge, whether others' losses are so sharp or somebody lies; u and v shrink to it, v / u stays.
    """
    if not weights or importance * learning_rate == 0:
        return None
    most = min(1 / (2 * importance * learning_rate), torch.finfo(torch.float32).max)
    scale = {name: most / tensor.clamp(min=most) for name, tensor in weights.items()}
    u, v = ({name: scale[name] * each[name] for name in scale} for each in (weights, targets))
    return lambda module: importance * curvature_penalty(module, u, v)


class Sharp(Protocol):
    """An upload that says how sharp its loss is."""

    @property
    def task_parameters(self) -> Parameters: ...
    @property
    def fisher(self) -> Parameters: ...


def summed_terms(uploads: Mapping[ClientId, Sharp]) -> tuple[Terms, dict[ClientId, Terms]]:
    """Return the terms of all who uploaded, and for each of them those of the others."""
    own = {client: _terms(upload) for client, upload in sorted(uploads.items()) if upload.fisher}
    of_others = {client: _sum([own[other] for other in own if other != client]) for client in uploads}
    return _sum(list(own.values())), of_others


def check_fisher(fisher: Parameters) -> None:
    """Raise ValueError for a Fisher information that is negative somewhere."""
    for name, tensor in fisher.items():
        if bool((tensor < 0).any()):
            raise ValueError(f"fisher of {name} is negative, expected 0 or more")


def _terms(upload: Sharp) -> Terms:
    """Return one client's, in float64: products of large numbers stay finite."""
    fisher = {name: tensor.to(torch.float64) for name, tensor in upload.fisher.items()}
    return Terms(
        fisher, {name: tensor * upload.task_parameters[name].to(torch.float64) for name, tensor in fisher.items()}
    )


def _sum(terms: list[Terms]) -> Terms:
    if not terms:
        return Terms()
    weights, targets = (
        {name: _finite(torch.stack([one[name] for one in each]).sum(dim=0)) for name in each[0]}
        for each in ([one.weights for one in terms], [one.targets for one in terms])
    )
    return Terms(weights, targets)


def _finite(tensor: Tensor) -> Tensor:
    most = torch.finfo(torch.float32).max
    return tensor.clamp(-most, most).to(torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class FedCurv(TaskMethod):
    """Both halves of the method; the other settings are those of ``TaskMethod``.

    Attributes:
        importance: lambda, the penalty's weight. 0 is FedAvg.
        fisher_batch_size: samples of one gradient in ``diagonal_fisher``.
    """

    name: ClassVar[str] = "fedcurv"
    Upload: ClassVar[type[Any]] = curv.Upload
    Download: ClassVar[type[Any]] = curv.Download
    AggregatorState: ClassVar[type[Any]] = curv.AggregatorState

    importance: float = 1.0
    fisher_batch_size: int = 32

    def __post_init__(self) -> None:
        TaskMethod.__post_init__(self)
        checks.within(0.0, math.inf, self, ["importance"])
        checks.at_least(1, self, ["fisher_batch_size"])

    def initial_download(self, rng: torch.Generator) -> curv.Download:
        """Return one random task model; nothing holds it yet."""
        return curv.Download(initialise(build_task_model(self.task), rng).state_dict())

    def download_for(self, state: curv.AggregatorState, client_id: ClientId, initial: curv.Download) -> curv.Download:
        held = state.clients.get(client_id, state)
        return curv.Download(state.average, held.weights, held.targets) if state.average else initial

    def upload_layout(self, name: str) -> Parameters | None:
        return gradient_layout(self.task) if name == "fisher" else TaskMethod.upload_layout(self, name)

    def check_upload(self, upload: curv.Upload) -> None:
        """Raise ValueError for an upload without samples, or a Fisher information that is negative."""
        TaskMethod.check_upload(self, upload)
        check_fisher(upload.fisher)

    def local_work(
        self, state: NoState, data: RoundData, download: curv.Download, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[NoState, curv.Upload]]:
        """Minimise L_s(w) + lambda ``curvature_penalty`` (Eq. 3), then look how sharp the loss is there."""
        held = pull(download.weights, download.targets, self.importance, self.learning_rate)

        def batch_loss(module: nn.Module, batch: Tensor) -> Tensor:
            loss = loss_of(self.task, module, data.images[batch], data.labels[batch])
            return loss + held(module) if held else loss  # Eq. 3

        parameters = yield self.descending(download.task_parameters, len(data.labels), rng, batch_loss)
        fisher = diagonal_fisher(self.task, parameters, data.images, data.labels, self.fisher_batch_size)
        return state, curv.Upload(parameters, len(data.labels), fisher)

    def aggregate(
        self,
        state: curv.AggregatorState,
        uploads: Mapping[ClientId, curv.Upload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[curv.AggregatorState, dict[ClientId, curv.Download]]:
        """Average the task models by volume, and sum for each client the terms of the others."""
        ordered, shares = in_order_with_shares(uploads)
        average = weighted_average([upload.task_parameters for upload in ordered], shares)
        every, of_others = summed_terms(uploads)
        known = {client: of_others.get(client, every) for client in sorted({*state.clients, *uploads})}
        new_state = curv.AggregatorState(known, average, every.weights, every.targets)
        return new_state, {client: self.download_for(new_state, client, curv.Download(average)) for client in known}
