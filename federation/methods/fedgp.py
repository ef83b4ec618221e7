"""FedGP: no client's step may work against what the samples in all clients' buffers ask for.

Dai et al. 2023, "FedGP: Buffer-based Gradient Projection for Continual Federated Learning", Algorithms 1 to 6, Eq. 4;
also known as Fed-A-GEM. ``base`` is what training does beside that: nothing (FedAvg with FedGP), or what DER, A-GEM,
FedProx or FedCurv do.
Real samples stay on the client; of them, a gradient travels.

Algorithm 1 sends twice per round: after the models were averaged to w_t, every client sends the gradient of w_t on its
buffer, and training starts from w_t with the mean of these gradients, g_ref. A round here has one upload and one
download. So a client computes the same gradient, of w_t on the buffer as the last round left it, once it has w_t, at
the start of its next local round, and sends it with that round's task model; the mean comes with w_{t+1}. It could send
the gradient of its own trained model a round earlier; but that model just fitted this buffer, so its gradient is next
to nothing, and what averaging forgot doesn't show in it. ``two_messages`` makes two rounds of one of the paper's, with
its order to the letter: for comparing, since a deployed client that doesn't train in a round has met its data in vain.

Differences from the paper: ``docs/methods/fedgp.md``.
As in the paper's code, g_ref^k is of 32 samples drawn from the buffer, in training mode, over all parameters at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from replayfleet.federation.methods import fedgp_records as fleet
from replayfleet.federation.methods.agem import against_the_buffer
from replayfleet.federation.methods.buffered_method import BufferedMethod, BufferUse, Drawn
from replayfleet.federation.methods.der import TARGETS, dark_experience, refreshed
from replayfleet.federation.methods.fedcurv import check_fisher, diagonal_fisher, pull, summed_terms
from replayfleet.federation.methods.fedcurv_records import Terms
from replayfleet.federation.methods.fedprox import squared_distance
from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import ClientId, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import forked_generator
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.steps.kept_samples import IMAGES, LABELS, Reservoir
from replayfleet.federation.methods.steps.projection import gradient_at, gradient_layout, joined, project_gradient
from replayfleet.federation.methods.task_method import TaskMethod, in_order_with_shares
from replayfleet.models.build import build_task_model, initialise

BASES = ("plain", "der", "agem", "fedprox", "fedcurv")
"""What local training has beside g_ref: nothing, DER's terms, A-GEM's projection, or what models are held to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FedGP(BufferedMethod):
    """Both halves of the method; the other settings are those of ``BufferedMethod`` and ``TaskMethod``.

    Attributes:
        base: one of ``BASES``.
        alpha: weight of DER's term, where ``base`` is ``der``.
        beta: weight of DER++'s further term, likewise; the paper's 0 leaves it out.
        targets: one of ``der.TARGETS``, likewise.
        reference_samples: of the buffer, in a client's share of g_ref.
        prox_mu: FedProx's mu, where ``base`` is ``fedprox``.
        importance: FedCurv's, where ``base`` is ``fedcurv``.
        fisher_batch_size: likewise.
        two_messages: whether every second round brings g_ref of the average model itself and no training.
    """

    name: ClassVar[str] = "fedgp"
    Upload: ClassVar[type[Any]] = fleet.Upload
    Download: ClassVar[type[Any]] = fleet.Download
    AggregatorState: ClassVar[type[Any]] = fleet.AggregatorState

    base: str = "plain"
    alpha: float = 1.0
    beta: float = 0.0
    targets: str = "met"
    reference_samples: int = 32
    prox_mu: float = 0.01
    importance: float = 1.0
    fisher_batch_size: int = 32
    two_messages: bool = False

    def __post_init__(self) -> None:
        BufferedMethod.__post_init__(self)
        checks.one_of(BASES, self, "base")
        checks.one_of(TARGETS, self, "targets")
        checks.within(0.0, math.inf, self, ["alpha", "beta", "prox_mu", "importance"])
        checks.at_least(2, self, ["reference_samples"])
        checks.at_least(1, self, ["fisher_batch_size"])
        if self.two_messages and self.base == "fedcurv":
            raise ValueError("two_messages is for the other bases: what fedcurv sends is lost in every second round")

    @property
    def rounds_alternate(self) -> bool:
        """Whether an upload means nothing in the round after its own."""
        return self.two_messages

    def initial_download(self, rng: torch.Generator) -> fleet.Download:
        """Return one random task model; there is no g_ref yet."""
        return fleet.Download(initialise(build_task_model(self.task), rng).state_dict())

    def download_for(
        self, state: fleet.AggregatorState, client_id: ClientId, initial: fleet.Download
    ) -> fleet.Download:
        if not state.average:
            return initial
        held = state.clients.get(client_id, state)
        return fleet.Download(state.average, state.reference, held.weights, held.targets, state.asks)

    def upload_layout(self, name: str) -> Parameters | None:
        return gradient_layout(self.task) if name in ("gradient", "fisher") else TaskMethod.upload_layout(self, name)

    def check_upload(self, upload: fleet.Upload) -> None:
        TaskMethod.check_upload(self, upload)
        check_fisher(upload.fisher)

    def local_work(
        self, state: Reservoir, data: RoundData, download: fleet.Download, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[Reservoir, fleet.Upload]]:
        """Take the average model's gradient on the buffer, then train it against g_ref (ClientUpdate, Eq. 4)."""
        start = download.task_parameters
        gradient = {} if self.two_messages and not download.asks else self.buffer_gradient(state, start, rng)
        if download.asks:
            return state, fleet.Upload(start, len(data.labels), gradient)
        reference = joined(download.reference, gradient_layout(self.task)) if download.reference else None
        base = self.base_use(download)

        def correct(module: nn.Module, drawn: Drawn) -> None:
            base.correct(module, drawn)
            if reference is not None:
                project_gradient(module, reference)  # Eq. 4, after what the base does (Algorithm 6)

        use = replace(base, correct=correct)
        kept = refreshed(self.task, start, state, self.targets) if use.keeps_logits else state
        parameters, kept = yield from self.trained(use, start, data, kept, rng)
        fisher: Parameters = {}
        if self.base == "fedcurv":
            fisher = diagonal_fisher(self.task, parameters, data.images, data.labels, self.fisher_batch_size)
        return kept, fleet.Upload(parameters, len(data.labels), gradient, fisher)

    def base_use(self, download: fleet.Download) -> BufferUse:
        """Return what the base does with the buffer, or adds to the loss without it."""
        if self.base == "der":
            return dark_experience(self.task, self.alpha, self.beta)
        if self.base == "agem":
            return against_the_buffer(self.task, self.precision)
        start, mu = download.task_parameters, self.prox_mu
        if self.base == "fedprox" and mu > 0:
            return BufferUse(lambda module, _: [mu / 2 * squared_distance(module, start)])
        held = pull(download.weights, download.targets, self.importance, self.learning_rate)
        return BufferUse(lambda module, _: [held(module)]) if held else BufferUse()

    def buffer_gradient(self, reservoir: Reservoir, average: Parameters, rng: torch.Generator) -> Parameters:
        """Return g_ref^k by parameter name (Algorithm 3); empty without a buffer, or if it isn't finite."""
        if not len(reservoir):
            return {}
        met = reservoir.drawn(self.reference_samples, forked_generator(rng, "reference"))
        gradient = gradient_at(self.task, average, met[IMAGES], met[LABELS], self.precision)
        return gradient if all(bool(torch.isfinite(tensor).all()) for tensor in gradient.values()) else {}

    def aggregate(
        self,
        state: fleet.AggregatorState,
        uploads: Mapping[ClientId, fleet.Upload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[fleet.AggregatorState, dict[ClientId, fleet.Download]]:
        """Average the task models by volume and the buffers' gradients evenly (Algorithm 1)."""
        ordered, shares = in_order_with_shares(uploads)
        average = state.average if state.asks else weighted_average([each.task_parameters for each in ordered], shares)
        gradients = [upload.gradient for upload in ordered if upload.gradient]
        evenly = torch.full((len(gradients),), 1 / max(1, len(gradients)), dtype=torch.float64)
        reference = weighted_average(gradients, evenly) if gradients else state.reference
        every, of_others = Terms(state.weights, state.targets), dict[ClientId, Terms]()
        if not state.asks:
            every, of_others = summed_terms(uploads)
        known = {name: of_others.get(name, every) for name in sorted({*state.clients, *uploads})}
        asks = self.two_messages and not state.asks
        new_state = fleet.AggregatorState(known, average, reference, every.weights, every.targets, asks)
        return new_state, {name: self.download_for(new_state, name, fleet.Download(average)) for name in known}
