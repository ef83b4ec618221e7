"""FedCIL: one ACGAN per client is generator and task model; the aggregator consolidates all by their own samples.

Qi et al. 2023, "Better Generative Replay for Continual Federated Learning" (ICLR), in the real-time protocol of pFedGRP
(its appendices B.1 and B.2): every round is a new task of its own.
Differences from the paper: ``docs/methods/fedcil.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from replayfleet.federation.methods import fedcil_records as cil
from replayfleet.federation.methods.fedcil_gan import (
    Acgan,
    AcganSchedule,
    DrawByClass,
    Labelled,
    MiniBatch,
    Teacher,
    balanced_draw,
    draw_by_class,
    train_acgan,
)
from replayfleet.federation.methods.kit import checks, packing
from replayfleet.federation.methods.kit.records import ClientId, Judge, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.steps.modules import judge_of, shuffled_batches
from replayfleet.federation.methods.task_method import in_order_with_shares
from replayfleet.models.acgan import build_acgan, initialised_acgan
from replayfleet.models.specs import TaskSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FedCIL:
    """Settings and both halves of the method; defaults are the released code's for 28 pixels.

    Attributes:
        task: the classification task.
        width: channels of the ACGAN's largest maps.
        local_iterations: mini-batches per round ("epochs" in the papers).
        gan_batch_size: samples per mini-batch, of new data and of replay each.
        gan_learning_rate: of both Adams.
        gan_beta1: of both Adams.
        gan_beta2: of both Adams.
        gan_weight_decay: of both Adams.
        new_weight: share of new data in the critic's loss beside replay.
        consistency: learn the paper's consistency with the global model; its released code doesn't.
        server_iterations: mini-batches of consolidation per round; 0 is plain averaging.
    """

    name: ClassVar[str] = "fedcil"
    stores_data: ClassVar[bool] = False
    deployable: ClassVar[bool] = False
    Upload: ClassVar[type[Any]] = cil.Upload
    Download: ClassVar[type[Any]] = cil.Download
    ClientState: ClassVar[type[Any]] = cil.Learnt
    AggregatorState: ClassVar[type[Any]] = cil.AggregatorState

    task: TaskSpec
    width: int = 64
    local_iterations: int = 400
    gan_batch_size: int = 32
    gan_learning_rate: float = 1e-4
    gan_beta1: float = 0.5
    gan_beta2: float = 0.99
    gan_weight_decay: float = 1e-5
    new_weight: float = 0.5
    consistency: bool = True
    server_iterations: int = 100

    def __post_init__(self) -> None:
        checks.task_kind(self)
        checks.at_least(1, self, ["width", "local_iterations"])
        checks.at_least(2, self, ["gan_batch_size"])
        checks.at_least(0, self, ["server_iterations"])
        checks.within(0.0, math.inf, self, ["gan_learning_rate", "gan_weight_decay"])
        checks.within(0.0, 1.0, self, ["gan_beta1", "gan_beta2", "new_weight"])

    def initial_states(self) -> tuple[cil.Learnt, cil.AggregatorState]:
        return cil.Learnt(), cil.AggregatorState()

    def initial_download(self, rng: torch.Generator) -> cil.Download:
        """Return one random ACGAN that knows no classes."""
        generator, critic = initialised_acgan(self.task, self.width, rng)
        return cil.Download(Acgan(generator.state_dict(), critic.state_dict()))

    def local_round(
        self, state: cil.Learnt, data: RoundData, download: cil.Download, rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[cil.Learnt, cil.Upload]:
        """Train the global ACGAN on this round's data, on replay from the client's last generator, and on consistency.

        The critic descends half the ACGAN loss of new data and half that of replay, with classes drawn uniformly, plus
        the terms of consistency enforcement.
        """
        now = data.counts()
        seen = {c: state.seen.get(c, 0) + now.get(c, 0) for c in sorted(state.seen.keys() | now.keys())}
        teacher = None
        if self.consistency and download.classes:
            teacher = Teacher(draw_by_class(self.task, self.width, download.gan.generator), download.classes)
        batches = self._local_batches(state, data, split_generator(rng))
        gan = train_acgan(
            self.task, download.gan, batches, sorted(seen), self._schedule(), split_generator(rng), teacher=teacher
        )
        return cil.Learnt(gan.generator, seen), cil.Upload(gan, now, seen)

    def aggregate(
        self,
        state: cil.AggregatorState,
        uploads: Mapping[ClientId, cil.Upload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[cil.AggregatorState, dict[ClientId, cil.Download]]:
        """Average the ACGANs by samples, then consolidate: train the mean on images of all clients' generators."""
        ordered, shares = in_order_with_shares(uploads)
        gan = Acgan(
            weighted_average([upload.gan.generator for upload in ordered], shares),
            weighted_average([upload.gan.critic for upload in ordered], shares),
        )
        learnt = {c: cil.Learnt(upload.gan.generator, upload.seen) for c, upload in uploads.items()}
        clients = dict(sorted({**state.clients, **learnt}.items()))
        classes = tuple(sorted({c for client in clients.values() for c, count in client.seen.items() if count > 0}))
        if self.server_iterations > 0:
            current = self._draws([(upload.gan.generator, upload.now) for upload in ordered])
            held = [state.clients[client_id] for client_id in sorted(uploads) if client_id in state.clients]
            earlier = self._draws([(client.generator, client.seen) for client in held])
            device = next(iter(gan.critic.values())).device
            batches = self._server_batches(current, earlier, split_generator(rng), device)
            gan = train_acgan(self.task, gan, batches, classes, self._schedule(), split_generator(rng))
        latest = cil.Download(gan, classes)
        return cil.AggregatorState(clients, latest), dict.fromkeys(clients, latest)

    def download_for(self, state: cil.AggregatorState, client_id: ClientId, initial: cil.Download) -> cil.Download:
        return state.latest or initial

    def upload_layout(self, name: str) -> Parameters | None:
        modules = dict(zip(("generator", "critic"), build_acgan(self.task, self.width), strict=True))
        return packing.layout(modules[name]) if name in modules else None

    def check_upload(self, upload: cil.Upload) -> None:
        packing.check_counts(upload.now, self.task.num_classes)
        packing.check_counts(upload.seen, self.task.num_classes)
        wrong = [c for c, count in upload.now.items() if count > upload.seen.get(c, 0)]
        if wrong:
            raise ValueError(
                f"class {wrong[0]}: {upload.now[wrong[0]]} samples now but {upload.seen.get(wrong[0], 0)} seen"
            )

    def predictor(self, download: cil.Download) -> Judge:
        return judge_of(build_acgan(self.task, self.width)[1], download.gan.critic, self.task.num_classes)

    def _local_batches(self, state: cil.Learnt, data: RoundData, rng: torch.Generator) -> Iterator[MiniBatch]:
        earlier = self._draws([(state.generator, state.seen)] if state.generator else [])
        for batch in shuffled_batches(len(data.labels), self.gan_batch_size, self.local_iterations, rng):
            new = Labelled(data.images[batch], data.labels[batch])
            replay = balanced_draw(earlier, self.gan_batch_size, rng, data.images.device) if earlier else None
            yield MiniBatch(new, replay)

    def _server_batches(
        self,
        current: Mapping[int, Sequence[DrawByClass]],
        earlier: Mapping[int, Sequence[DrawByClass]],
        rng: torch.Generator,
        device: torch.device,
    ) -> Iterator[MiniBatch]:
        for _ in range(self.server_iterations):
            new = balanced_draw(current, self.gan_batch_size, rng, device)
            yield MiniBatch(new, balanced_draw(earlier, self.gan_batch_size, rng, device) if earlier else None)

    def _draws(self, known: Sequence[tuple[Parameters, Mapping[int, int]]]) -> dict[int, list[DrawByClass]]:
        """Return class id -> the generators that know it, from (generator, counts of its classes)."""
        draws: dict[int, list[DrawByClass]] = {}
        for generator, counts in known:
            draw = draw_by_class(self.task, self.width, generator)
            for class_id, count in counts.items():
                if count > 0:
                    draws.setdefault(class_id, []).append(draw)
        return draws

    def _schedule(self) -> AcganSchedule:
        return AcganSchedule(
            width=self.width,
            learning_rate=self.gan_learning_rate,
            betas=(self.gan_beta1, self.gan_beta2),
            weight_decay=self.gan_weight_decay,
            new_weight=self.new_weight,
        )
