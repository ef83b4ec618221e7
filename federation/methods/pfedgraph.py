"""pFedGraph: a collaboration graph, learned from how alike the clients' updates are, personalises every model.

Ye et al. 2023, "Personalized Federated Learning with Inferred Collaboration Graphs".
Differences from the paper: ``docs/methods/pfedgraph.md``.

The aggregator never sees the model that round 0 starts from: a client that started from it sends it back once, and the
aggregator's state keeps the one that most sent. Nothing travels for that, because blobs are named by content and the
aggregator has it.

Axes: N clients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.federation.methods import pfedgraph_records as graph
from replayfleet.federation.methods.kit import checks, packing
from replayfleet.federation.methods.kit.records import ClientId, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import NoState, TaskUpload
from replayfleet.federation.methods.lockstep import Descend, Work
from replayfleet.federation.methods.steps.averaging import check_distribution, project_to_simplex, weighted_average
from replayfleet.federation.methods.task_method import TaskMethod, average_by_volume, require_uploads
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.resnet import ResNet
from replayfleet.models.specs import TaskSpec

SAME_CLUSTER = 0.9
"""Updates with a larger cosine count as equal (released code)."""


def collaboration_weights(distances: Tensor, sample_shares: Tensor, strength: float) -> Tensor:
    """Return the collaboration graph: for each client i the solution of pFedGraph's quadratic programme.

    Row i minimises ``strength * |x|^2 + (d_i - 2 * strength * p)'x`` over ``x >= 0``, ``sum x = 1``.

    Args:
        distances: (N, N), d_ij small where clients i and j should work together.
        sample_shares: (N,) p, each client's share of all samples.
        strength: lambda > 0; a large one gives p to everybody (FedAvg), a small one the nearest client alone.

    Returns:
        (N, N) float64, non-negative, rows sum to 1.

    Raises:
        ValueError: The arguments have other shapes, aren't finite, or the shares are no distribution.
    """
    if not (0 < strength < math.inf):
        raise ValueError(f"strength is {strength}, expected a finite number above 0")
    num_clients = len(distances) if distances.ndim else 0
    if num_clients == 0 or tuple(distances.shape) != (num_clients, num_clients):
        raise ValueError(f"distances have shape {tuple(distances.shape)}, expected (N, N) with N of at least 1")
    check_distribution(sample_shares, num_clients)
    # Completing the square leaves the point of the simplex nearest to p - d_i / (2 lambda).
    points = sample_shares.to(torch.float64) - distances.to(torch.float64) / (2 * strength)
    if not bool(torch.isfinite(points).all()):
        raise ValueError("distances must be finite, and not so large that dividing them by the strength overflows")
    return project_to_simplex(points)


def update_distances(models: Sequence[Parameters], start: Parameters, names: Collection[str]) -> Tensor:
    """Return ``d_ij = -cos(theta_i - theta_0, theta_j - theta_0)``, and -1 where the cosine exceeds 0.9.

    A model that didn't move has no direction; its cosines are 0.

    Args:
        models: N task models.
        start: theta_0, where all of them began.
        names: of the parameters that count; not BatchNorm's statistics.

    Returns:
        (N, N) float64.
    """
    products = torch.zeros(len(models), len(models), dtype=torch.float64)
    for name in sorted(names):
        origin = start[name].to(torch.float64)
        moved = torch.stack([(model[name].to(torch.float64) - origin).flatten() for model in models])
        products += (moved @ moved.T).cpu()
    norms = products.diagonal().sqrt()
    scale = torch.outer(norms, norms)
    cosines = torch.where(scale > 0, products / scale, torch.zeros_like(products))
    return torch.where(cosines > SAME_CLUSTER, torch.full_like(cosines, -1.0), -cosines)


def mixed_by_similarity(
    models: Mapping[ClientId, Parameters],
    sizes: Mapping[ClientId, int],
    start: Parameters,
    strength: float,
    *,
    names: Collection[str],
) -> dict[ClientId, graph.Mixture]:
    """Return every client's personalised model: the whole server step of pFedGraph.

    Args:
        models: client id -> its task model.
        sizes: client id -> samples behind it.
        start: theta_0, the model that round 0 began with.
        strength: lambda of the quadratic programme.
        names: of the parameters whose updates are compared; ``parameter_names`` of the task.

    Raises:
        ValueError: There are no models, no samples, or the models' layouts differ.
    """
    client_ids = sorted(models)
    ordered = [models[client_id] for client_id in client_ids]
    volumes = torch.tensor([sizes[client_id] for client_id in client_ids], dtype=torch.float64)
    distances = update_distances(ordered, start, names)
    shares = collaboration_weights(distances, volumes / volumes.sum(), strength)
    return {
        client_id: graph.Mixture(weighted_average(ordered, row), dict(zip(client_ids, row.tolist(), strict=True)))
        for client_id, row in zip(client_ids, shares, strict=True)
    }


def _sent_by_most(models: Sequence[Parameters]) -> Parameters:
    """Return the model that most of these are, the first one of equals: it stays, and one client may lie."""
    alike: list[list[Parameters]] = []
    for model in models:
        group = next((group for group in alike if packing.same_bits(group[0], model)), None)
        if group is None:
            alike.append([model])
        else:
            group.append(model)
    return max(alike, key=len, default=[{}])[0]


def parameter_names(task: TaskSpec) -> frozenset[str]:
    """Return the names of the task model's parameters, without its BatchNorm statistics."""
    return frozenset(name for name, _ in build_task_model(task, device="meta").named_parameters())


def cosine_to(module: nn.Module, reference: Parameters) -> Tensor:
    """Return the cosine between a module's parameters, as one vector, and those of the same names in ``reference``.

    Returns:
        Scalar, differentiable with respect to the module's parameters.
    """
    pairs = [(parameter, reference[name]) for name, parameter in module.named_parameters()]
    product = torch.stack([(own * other).sum() for own, other in pairs]).sum()
    norm = torch.stack([own.square().sum() for own, _ in pairs]).sum().sqrt()
    reference_norm = torch.stack([other.square().sum() for _, other in pairs]).sum().sqrt()
    cosine: Tensor = product / (norm * reference_norm)
    return cosine


@dataclass(frozen=True, kw_only=True, slots=True)
class PFedGraph(TaskMethod):
    """Both halves of the method; local training is that of ``TaskMethod``.

    Attributes:
        strength: lambda of the quadratic programme (``alpha`` of the released code).
        regulariser_weight: of the cosine in Eq. 1; 0 switches it off.
        regulariser_sign: ``minus`` (Eq. 1) holds the client near its personalised model; ``plus`` (released code)
            pushes it away.
    """

    name: ClassVar[str] = "pfedgraph"
    Upload: ClassVar[type[Any]] = graph.Upload
    Download: ClassVar[type[Any]] = graph.Download
    AggregatorState: ClassVar[type[Any]] = graph.AggregatorState

    task: TaskSpec
    strength: float = 0.8
    regulariser_weight: float = 0.01
    regulariser_sign: str = "minus"

    def __post_init__(self) -> None:
        TaskMethod.__post_init__(self)
        checks.within(1e-6, 1e6, self, ["strength"])
        checks.within(0.0, math.inf, self, ["regulariser_weight"])
        checks.one_of(("minus", "plus"), self, "regulariser_sign")

    def initial_download(self, rng: torch.Generator) -> graph.Download:
        """Return one random task model, marked as the one that everything starts from."""
        return graph.Download(initialise(build_task_model(self.task), rng).state_dict(), is_initial=True)

    def download_for(
        self, state: graph.AggregatorState, client_id: ClientId, initial: graph.Download
    ) -> graph.Download:
        if client_id in state.clients:
            mixed = state.clients[client_id]
            return graph.Download(mixed.task_parameters, mixed.weights)
        return graph.Download(state.common) if state.common else initial

    def local_work(
        self, state: NoState, data: RoundData, download: graph.Download, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[NoState, graph.Upload]]:
        """Minimise ``F_i(theta) -+ weight * cos(theta, personalised model)`` from the personalised model (Eq. 1)."""
        parameters = yield self.regularised(data, download, rng)
        initial = download.task_parameters if download.is_initial else {}
        return state, graph.Upload(parameters, len(data.labels), initial)

    def regularised(self, data: RoundData, download: graph.Download, rng: torch.Generator) -> Descend:
        """Return what a client trains: its personalised model, held near where it starts."""
        start = download.task_parameters
        weight = 0.0 if download.is_initial else self.regulariser_weight
        signed = -weight if self.regulariser_sign == "minus" else weight

        def batch_loss(module: ResNet, batch: Tensor) -> Tensor:
            loss = F.cross_entropy(module(data.images[batch]), data.labels[batch])
            return loss + signed * cosine_to(module, start) if signed else loss  # Eq. 1

        return self.descending(start, len(data.labels), rng, batch_loss)

    def aggregate(
        self,
        state: graph.AggregatorState,
        uploads: Mapping[ClientId, graph.Upload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[graph.AggregatorState, dict[ClientId, graph.Download]]:
        """Infer the collaboration graph among this round's clients and mix a model for each.

        Raises:
            ValueError: There are no uploads, or none of the first ones says where it started.
        """
        require_uploads(uploads)
        initial = state.initial or _sent_by_most([uploads[c].initial for c in sorted(uploads) if uploads[c].initial])
        if not initial:
            raise ValueError("none of the first uploads has the set 'initial', so nothing can be compared")
        models = {client_id: upload.task_parameters for client_id, upload in uploads.items()}
        sizes = {client_id: upload.num_samples for client_id, upload in uploads.items()}
        mixtures = mixed_by_similarity(models, sizes, initial, self.strength, names=parameter_names(self.task))
        clients = dict(sorted({**state.clients, **mixtures}.items()))
        average = average_by_volume({c: TaskUpload(models[c], sizes[c]) for c in models})
        new_state = graph.AggregatorState(clients, average, initial)
        return new_state, {c: graph.Download(mixed.task_parameters, mixed.weights) for c, mixed in clients.items()}
