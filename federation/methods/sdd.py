"""SDD: few samples of new classes, learned beside images that the aggregator makes of the old ones without data.

Liu et al. 2025, "Few-Shot Class-Incremental Learning with Non-IID Decentralized Data", Algorithm 2. Clients replay
synthetic images of old classes under labels that may be wrong (noise-aware generative replay); the aggregator makes
images of new classes against the ensemble of local models, and weighs each local model's row of a new class by how well
it knows them (class-specific weighted aggregation).

Differences from the paper: ``docs/methods/sdd.md``.
Axes: B batch, K classes, M clients, N new classes, C_B old classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.federation.methods import sdd_records as records
from replayfleet.federation.methods.fedprox import squared_distance
from replayfleet.federation.methods.image_synthesis_method import Answered, ImageSynthesisMethod, ReplayPool
from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import ClientId, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import digest_generator, split_generator
from replayfleet.federation.methods.kit.task_records import NoState
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps import data_free
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.steps.data_free import Observation
from replayfleet.federation.methods.steps.incremental import absent_classes, current_loss
from replayfleet.federation.methods.synthesis_records import IMAGES, CountedUpload
from replayfleet.federation.methods.target import FastRound, fast_rounds, target_generator
from replayfleet.federation.methods.task_method import in_order_with_shares
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.data_free import TargetGenerator
from replayfleet.models.resnet import ResNet

REPLAY_LOSSES = ("noise-aware", "cross-entropy", "distillation")
"""What clients learn from replay: Eq. 1; its first half; or what the model before says, as the baseline has it."""

AGGREGATIONS = ("class-specific", "average")
"""How rows of new classes are joined: by Eq. 14 to 17, or like everything else by data volume."""

TEACHERS = ("ensemble", "average")
"""Against what images of new classes are made: all local models together (Eq. 4), or their average."""

LABELLED_AMONG = ("new", "seen")
"""Among whose logits a new class's image is labelled: the new classes', as the paper has it below Eq. 4, or all seen.

Of two new ones an image needs only be likelier the one than the other, and an old class may be likelier than both: then
the next session relabels it as that one, and Eq. 14 finds that nobody knows the new class.
"""

LEAST_LABEL = 1e-4
"""What a one-hot label has in place of 0 in the reverse cross-entropy: its logarithm is finite."""
LEAST_PROBABILITY = 1e-7
JUDGED_AT_ONCE = 256


def noise_aware_loss(logits: Tensor, pseudo_labels: Tensor, num_old_classes: int, alpha: float, beta: float) -> Tensor:
    """Return ``alpha CE + beta RCE`` of replay whose labels may be wrong (Eq. 1), the mean over the batch.

    ``RCE = -sum_k p_k log y_k`` with the label y one-hot, its zeros raised to ``LEAST_LABEL``: a wrong label that the
    model doubts weighs at most ``-log LEAST_LABEL``, where in the cross-entropy it weighs without bound.

    Args:
        logits: (B, K); the first C_B take part.
        pseudo_labels: (B,) int64 below C_B.
        num_old_classes: C_B.
        alpha: weight of the cross-entropy.
        beta: weight of the reverse one.
    """
    old = logits[:, :num_old_classes]
    probabilities = old.softmax(dim=1).clamp_min(LEAST_PROBABILITY)
    labels = F.one_hot(pseudo_labels, num_old_classes).to(old.dtype).clamp_min(LEAST_LABEL)
    reverse = -(probabilities * labels.log()).sum(dim=1).mean()
    return alpha * F.cross_entropy(old, pseudo_labels) + beta * reverse


def class_specific_weights(accuracies: Tensor) -> Tensor:
    """Return each local model's share in each new class's row (Eq. 16 and 17), (M, N): columns sum to 1.

    Eq. 17 sums without dividing; a linear head then grows with the number of clients, and the reference divides.

    Args:
        accuracies: (M, N) in [0, 1], of each local model on each new class. A class that nobody knows is shared evenly.
    """
    totals = accuracies.sum(dim=0)
    even = torch.full_like(accuracies, 1 / len(accuracies))
    return torch.where(totals > 0, accuracies / totals.clamp_min(torch.finfo(accuracies.dtype).tiny), even)


def entropy_loss(logits: Tensor) -> Tensor:
    """Return ``sum_k p_k log p_k / K``, the mean over the batch: least where the teacher is unsure (Eq. 6 and 7)."""
    logs = logits.log_softmax(dim=1)
    return (logs.exp() * logs).sum(dim=1).mean() / logits.shape[1]


def activation_divergence(features: Tensor) -> Tensor:
    """Return ``KL(softmax(f) | U) = log D + sum_d p_d log p_d``, the mean over the batch: 0 where all are alike.

    Chen et al. 2021, "FedMAX: Mitigating Activation Divergence for Accurate and Communication-Efficient Federated
    Learning": clients that hold little spread their activations, so that their models don't drift apart.

    Args:
        features: (B, D) under the head.
    """
    logs = features.log_softmax(dim=1)
    return math.log(features.shape[1]) + (logs.exp() * logs).sum(dim=1).mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class SDD(ImageSynthesisMethod):
    """Settings and both halves of the method; the other settings are those of ``ImageSynthesisMethod``.

    Attributes:
        replay_loss: one of ``REPLAY_LOSSES``.
        aggregation: one of ``AGGREGATIONS``.
        teachers: one of ``TEACHERS``.
        labelled_among: one of ``LABELLED_AMONG``.
        proximal_weight: mu of FedProx's term beside Eq. 3, for Table V.
        activation_weight: beta of FedMax's, likewise.
        alpha: weight of the cross-entropy in Eq. 1.
        beta: weight of the reverse cross-entropy.
        replay_weight: k of Eq. 3.
        session_learning_rate: of the rows of new classes, in a round that brings a client new classes beside replay; 0
            is ``learning_rate``.
        fine_tuning_scale: share of it that everything else has in such a round.
        old_rows_scale: share of it that rows of old classes have in such a round; 0 is ``fine_tuning_scale``.
        replay_per_class: images of a class that the replay buffer keeps.
        latent_learning_rate: of the latents, which are trained too.
        entropy_weight: lambda_2 of Eq. 10; ``label_weight``, ``batch_norm_weight`` and ``adversarial_weight`` are the
            others.
    """

    name: ClassVar[str] = "sdd"
    Download: ClassVar[type[Any]] = records.Download
    AggregatorState: ClassVar[type[Any]] = records.AggregatorState

    replay_loss: str = "noise-aware"
    aggregation: str = "class-specific"
    teachers: str = "ensemble"
    labelled_among: str = "new"
    proximal_weight: float = 0.0
    activation_weight: float = 0.0
    alpha: float = 1.0
    beta: float = 1.0
    replay_weight: float = 1.0
    session_learning_rate: float = 0.0
    fine_tuning_scale: float = 0.001
    old_rows_scale: float = 0.0
    replay_per_class: int = 100
    latent_learning_rate: float = 0.01
    entropy_weight: float = 1.0
    synthetic_batch_size: int = 128
    passes: str = "joined"
    synthesis_rounds: int = 100
    synthesis_steps: int = 40
    generator_learning_rate: float = 1e-3
    batch_norm_weight: float = 1.0
    label_weight: float = 1.0
    adversarial_where: str = "disagree"
    warm_up_rounds: int = 20
    student_steps: int = 200

    def __post_init__(self) -> None:
        ImageSynthesisMethod.__post_init__(self)
        checks.one_of(REPLAY_LOSSES, self, "replay_loss")
        checks.one_of(AGGREGATIONS, self, "aggregation")
        checks.one_of(TEACHERS, self, "teachers")
        checks.one_of(LABELLED_AMONG, self, "labelled_among")
        weights = ["alpha", "beta", "replay_weight", "entropy_weight", "proximal_weight", "activation_weight"]
        checks.within(0.0, math.inf, self, [*weights, "latent_learning_rate", "session_learning_rate"])
        checks.within(0.0, 1.0, self, ["fine_tuning_scale", "old_rows_scale"])
        checks.at_least(1, self, ["replay_per_class"])

    def initial_download(self, rng: torch.Generator) -> records.Download:  # type: ignore[override]
        """Return one random task model; there is nothing to replay yet."""
        return records.Download(initialise(build_task_model(self.task), rng).state_dict())

    def download_for(  # type: ignore[override]
        self, state: records.AggregatorState, client_id: ClientId, initial: records.Download
    ) -> records.Download:
        return records.Download(state.average, state.synthetic, state.seen) if state.average else initial

    def local_work(
        self, state: NoState, data: RoundData, download: records.Download, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[NoState, CountedUpload]]:
        """Minimise Eq. 3 from the global model; replay is of the classes that the round's own data lack."""
        counts, start = data.counts(), download.task_parameters
        old = [class_id for class_id in sorted(download.synthetic) if class_id not in counts]
        if not old:
            parameters = yield self.training(data, start, rng)
            return state, CountedUpload(parameters, counts)
        device, begins = data.images.device, not counts.keys() <= set(download.seen)  # a session
        unmet = [class_id for class_id in range(self.task.num_classes) if class_id not in download.seen]
        replay = ReplayPool(
            images=data_free.from_bytes(torch.cat([download.synthetic[class_id][IMAGES] for class_id in old])),
            teacher=data_free.frozen_task_model(self.task, start),
            known=torch.tensor(old, device=device),
            temperature=self.temperature,
            batch_size=self.synthetic_batch_size,
            padding=self.padding if self.replay_augmented else None,
            rng=split_generator(rng),
        )
        absent = absent_classes(download.seen, counts, self.logits)
        if begins:
            start = with_fresh_rows(start, unmet)

        def batch_loss(module: ResNet, batch: Tensor) -> Tensor:
            replayed = replay.draw()
            real, synthetic = self.features_of(module, data.images[batch], replayed.images)
            new = current_loss(module.head(real), data.labels[batch], absent)  # Eq. 2
            loss = new + self.replay_weight * self.loss_on_replay(replayed, module.head(synthetic))  # Eq. 3
            if self.proximal_weight > 0.0:
                loss = loss + self.proximal_weight / 2 * squared_distance(module, start)
            if self.activation_weight > 0.0:
                loss = loss + self.activation_weight * activation_divergence(real)
            return loss

        rate = self.session_learning_rate if begins else 0.0
        settings = replace(self, learning_rate=rate or self.learning_rate)
        request = settings.descending(start, len(data.labels), rng, batch_loss)
        if begins:  # rows of the session's other classes move as far: they learn that this client has none of them
            request = replace(request, after_backward=self._gently(torch.tensor(unmet, device=device)))
        parameters = yield request
        return state, CountedUpload(parameters, counts)

    def loss_on_replay(self, replayed: Answered, logits: Tensor) -> Tensor:
        """Return L_old of logits (B, K) given for a step's replay; those of old classes alone take part."""
        if self.replay_loss == "distillation":
            return replayed.distillation(logits)
        pseudo_labels = replayed.by.logits[:, replayed.known].argmax(dim=1)
        beta = self.beta if self.replay_loss == "noise-aware" else 0.0
        return noise_aware_loss(logits[:, replayed.known], pseudo_labels, len(replayed.known), self.alpha, beta)

    def _gently(self, rows: Tensor) -> Callable[[nn.Module], None]:
        """Return what scales a step of SGD, weight decay included, for all but these rows of the head."""
        decay, scale = self.weight_decay, self.fine_tuning_scale
        old_rows = self.old_rows_scale or scale

        def scale_down(module: nn.Module) -> None:
            for name, parameter in module.named_parameters():
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.clone()
                share = old_rows if name in _ROWS else scale
                parameter.grad.add_(parameter.detach(), alpha=decay).mul_(share).sub_(parameter.detach(), alpha=decay)
                if name in _ROWS:
                    parameter.grad[rows] = gradient[rows]

        return scale_down

    def aggregate(  # type: ignore[override]
        self,
        state: records.AggregatorState,
        uploads: Mapping[ClientId, CountedUpload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[records.AggregatorState, dict[ClientId, records.Download]]:
        """Make images of new classes against the ensemble, then join the models by them (Algorithm 2)."""
        ordered, shares = in_order_with_shares(uploads)
        models = [upload.task_parameters for upload in ordered]
        average: dict[str, Tensor] = weighted_average(models, shares)  # Eq. 12
        met = {class_id for upload in ordered for class_id in upload.counts}
        seen = tuple(sorted({*state.seen, *met}))
        new = tuple(sorted(met - set(state.seen)))
        session = bool(new and state.seen)
        members = [data_free.frozen_task_model(self.task, parameters) for parameters in models] if session else []
        teachers = members if self.teachers == "ensemble" else []
        teacher = data_free.Ensemble(teachers) if teachers else data_free.frozen_task_model(self.task, average)  # Eq. 4
        generator, synthetic = self._images_of(
            teacher, {} if new else state.generator, new or tuple(sorted(met)), seen, max(1, len(teachers)), rng
        )
        if session and self.aggregation == "class-specific":
            weights = class_specific_weights(accuracies_of(members, synthetic, new, seen))
            for name in _ROWS & average.keys():
                place = torch.tensor(new, device=average[name].device)
                rows = torch.stack([parameters[name][place] for parameters in models]).to(torch.float64)
                share = weights.to(rows.device).reshape(*weights.shape, *[1] * (rows.ndim - 2))
                average[name] = average[name].clone()
                average[name][place] = (share * rows).sum(dim=0).to(average[name].dtype)  # Eq. 16 to 18
        buffer = dict(sorted({**state.synthetic, **synthetic}.items()))
        known = tuple(sorted({*state.clients, *uploads}))
        download = records.Download(average, buffer, seen)
        return records.AggregatorState(average, generator, buffer, seen, known), dict.fromkeys(known, download)

    def _images_of(
        self,
        teacher: data_free.Teacher,
        generator: Parameters,
        classes: tuple[int, ...],
        seen: tuple[int, ...],
        num_teachers: int,
        rng: torch.Generator,
    ) -> tuple[Parameters, dict[int, Parameters]]:
        """Return the generator and the last ``replay_per_class`` images of each class that any were made of."""
        settings = replace(self, batch_norm_weight=self.batch_norm_weight / num_teachers)  # Eq. 8: the mean over them
        generator, images, labels = settings.images_against(
            teacher, generator, classes, rng, seen if self.labelled_among == "seen" else classes
        )
        found = {class_id: images[labels.to(images.device) == class_id] for class_id in classes if len(images)}
        kept = {class_id: each[-self.replay_per_class :].clone() for class_id, each in found.items() if len(each)}
        return generator, {class_id: {IMAGES: each} for class_id, each in kept.items()}

    def open_rounds(self, module: TargetGenerator, rng: torch.Generator) -> Callable[[Tensor], FastRound]:
        """Return what opens each round of synthesis: TARGET's, with the entropy among its losses."""
        return fast_rounds(self, module, rng, _UnsureRound)

    def _generator(self, parameters: Parameters, rng: torch.Generator) -> TargetGenerator:
        return target_generator(self, parameters, rng)


_ROWS = {"head.weight", "head.bias"}
"""Parameters with one row for each class."""


def with_fresh_rows(parameters: Parameters, classes: Sequence[int]) -> dict[str, Tensor]:
    """Return a task model whose rows of these classes are as a new head's: W_new of a session, below Eq. 13.

    While others are learned, rows of classes to come learn to answer nothing, and those that grew long turn slowly.
    They are drawn from the model itself, so that all clients begin the session with the same.
    """
    made, weight = dict(parameters), parameters["head.weight"]
    rng, bound = digest_generator(weight.detach().cpu().numpy().tobytes()), weight.shape[1] ** -0.5
    for name in sorted(_ROWS & parameters.keys()):
        drawn = torch.empty(len(classes), *made[name].shape[1:]).uniform_(-bound, bound, generator=rng)
        made[name] = made[name].index_copy(0, torch.tensor(classes, device=made[name].device), drawn.to(made[name]))
    return made


class _UnsureRound(FastRound):
    def extra_loss(self, judged: Observation) -> Tensor:
        """Return lambda_2 of Eq. 10 times the entropy's loss over the classes of the round."""
        classes = torch.unique(self.labels)
        weight: float = self.settings.entropy_weight
        return weight * entropy_loss(judged.logits[:, classes])


@torch.no_grad()
def accuracies_of(
    members: list[ResNet], synthetic: Mapping[int, Parameters], new: tuple[int, ...], seen: tuple[int, ...]
) -> Tensor:
    """Return A of Eq. 15, (M, N) float64: the share of each new class's images that each local model names so.

    Args:
        members: the local models.
        synthetic: images by class; a class without any counts as known by nobody.
        new: the new classes.
        seen: the classes that an answer may name, the new ones among them.
    """
    found = torch.zeros(len(members), len(new), dtype=torch.float64)
    answers = torch.tensor(seen, device=next(members[0].parameters()).device)
    for column, class_id in enumerate(new):
        images = data_free.from_bytes(synthetic[class_id][IMAGES]) if class_id in synthetic else torch.empty(0)
        for row, member in enumerate(members):
            right = 0
            for part in images.split(JUDGED_AT_ONCE) if len(images) else ():
                right += int((member(part)[:, answers].argmax(dim=1) == seen.index(class_id)).sum())
            found[row, column] = right / max(1, len(images))
    return found
