"""A client's generative memory: what it remembers, how it replays that, and when it learns it anew.

The generative replay architecture of pFedGRP (section 4.1), apart from its aggregation: ``pfedgrp`` and its ablations
``fedavg-replay`` and ``pfedgraph-replay`` share it.
Axes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from replayfleet.federation.methods.kit import checks, packing, travel
from replayfleet.federation.methods.kit.each import by_groups
from replayfleet.federation.methods.kit.pace import Pace, Stage, steps_per_epoch
from replayfleet.federation.methods.kit.packing import ALL_CLASSES
from replayfleet.federation.methods.kit.privacy import History, decoded_histories, encoded_histories, joined
from replayfleet.federation.methods.kit.records import Artefacts, Draw, Judge, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.steps.looks import partly_detailed, smoothed
from replayfleet.federation.methods.steps.replay import (
    Replay,
    draw_labelled_replay,
    draw_replay,
    eager_sampler,
    generation_scale,
    recognised_share,
)
from replayfleet.federation.methods.steps.sub_generators.gaussian import counted_as
from replayfleet.federation.methods.steps.sub_generators.grouped_gan import SubGeneratorJob, train_sub_generators
from replayfleet.federation.methods.steps.sub_generators.kinds import Ddpm, Mixture, SubGeneratorKind, WganGp
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import SubGenerator
from replayfleet.models.ddpm import require_diffusers
from replayfleet.models.specs import DetectionSpec, MixtureSpec, TaskSpec

_MIXTURES = ("pca-gaussian", "pca-mixture")
SUB_GENERATORS = ("wgan-gp", "ddpm", *_MIXTURES)
"""Kinds of sub-generators."""

_OF_KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gan_batch_size", "gan_learning_rate", "gan_beta1", "gan_beta2"), ("wgan-gp",)),
    **dict.fromkeys(("critic_steps_per_generator_step", "sub_generator_epochs"), ("wgan-gp",)),
    **dict.fromkeys(("ddpm_epochs", "ddpm_width", "ddpm_batch_size"), ("ddpm",)),
    **dict.fromkeys(("ddpm_learning_rate", "ddpm_sampling_steps"), ("ddpm",)),
    "first_sub_generator_epochs": ("wgan-gp", "ddpm"),
    "pca_dims": _MIXTURES,
    "pca_components": ("pca-mixture",),
}
"""Settings that count for some kinds alone."""

_CRITICS = packing.SetsByClass("critic/")
_HISTORIES = "histories"


@dataclass(frozen=True, slots=True)
class _Pairs(packing.SubGenerators):
    """Generators, which travel too, and beside them critics, which don't, and what DP-SGD cost."""

    def pack(self, value: Any, name: str) -> Artefacts:
        generators = packing.SubGenerators.pack(self, {c: own.generator for c, own in value.items()}, name)
        critics = _CRITICS.pack({c: own.critic for c, own in value.items() if own.critic}, _CRITICS.name)
        histories = encoded_histories({c: own.history for c, own in value.items() if own.history})
        facts = {_HISTORIES: histories} if histories else {}  # without DP-SGD, as if there were none
        return Artefacts({**generators.parameter_sets, **critics.parameter_sets}, facts)

    def unpack(self, artefacts: Artefacts, name: str, default: Any) -> Any:
        generators = packing.SubGenerators.unpack(self, artefacts, name, default)
        critics = _CRITICS.unpack(artefacts, _CRITICS.name, default)
        histories = decoded_histories(artefacts.facts.get(_HISTORIES, {}), _HISTORIES)
        return {c: SubGenerator(own, critics.get(c, {}), histories.get(c, ())) for c, own in generators.items()}


@dataclass(frozen=True, slots=True)
class Memory(packing.Record):
    """What a client remembers between rounds.

    Attributes:
        sub_generators: class id -> its sub-generator; one under ``ALL_CLASSES`` where a single one draws all classes.
        seen: class id -> real samples met in all rounds so far.
    """

    sub_generators: Annotated[Mapping[int, SubGenerator], _Pairs()] = field(default_factory=dict)
    seen: Annotated[Mapping[int, int], packing.COUNTS] = field(default_factory=dict)

    def recovered_from(
        self,
        sub_generators: Mapping[int, Parameters],
        seen: Mapping[int, int],
        histories: Mapping[int, History] | None = None,
    ) -> Memory:
        """Return the memory with what it lacks of the aggregator's cache added: after a lost disk, everything.

        Where the disk is an earlier copy of itself, what was spent since is added to ``histories``.
        """
        spent = histories or {}
        own = {
            c: replace(one, history=joined(one.history, spent[c])) if c in spent else one
            for c, one in self.sub_generators.items()
        }
        missing = {
            c: SubGenerator(own, {}, spent.get(c, ()))
            for c, own in sub_generators.items()
            if c not in self.sub_generators
        }
        if not missing:
            return replace(self, sub_generators=own)
        return Memory(
            sub_generators=dict(sorted({**missing, **own}.items())),
            seen=dict(sorted({**seen, **self.seen}.items())),
        )

    def seen_with(self, data: RoundData) -> dict[int, int]:
        """Return ``seen`` with a round's samples counted in."""
        now = data.counts()
        return {c: self.seen.get(c, 0) + now.get(c, 0) for c in sorted(self.seen.keys() | now.keys())}

    def after(self, data: RoundData, updated: Mapping[int, SubGenerator]) -> Memory:
        """Return the memory after a round that trained ``updated``."""
        return Memory(dict(sorted({**self.sub_generators, **updated}.items())), self.seen_with(data))


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Settings of the memory, which a method inherits beside ``TaskMethod``'s; defaults are pFedGRP's (appendix B.2).

    It declares no slots of its own, so that a method with slots can have it as a second base.

    Attributes:
        task: the classification task.
        filter_replay: keep only replay that the task model recognises; False is ablation AS1.
        max_tries_factor: latents per wanted sample before replay is filled with the least-bad ones.
        generators: ``per-class``, or ``single`` (ablation AS3): one WGAN-GP of doubled width for all classes, trained
            in every round on real data and the round's replay; who filters then also labels.
        gate: retrain a sub-generator only if the drift gate says so; False is ablation AS2.
        gate_threshold: TH_G: retrain if less than this share of its samples is recognised.
        gate_samples: samples that the gate looks at.
        sub_generator_epochs: epochs per sub-generator update.
        first_sub_generator_epochs: epochs of a first update from random parameters; 0 means the same as later ones.
        gan_batch_size: samples per critic step.
        gan_learning_rate: of both Adams.
        gan_beta1: of both Adams.
        gan_beta2: of both Adams.
        critic_steps_per_generator_step: n_critic.
        sub_generator: ``wgan-gp``; ``pca-gaussian``, a class's mean and directions of largest variance, in closed
            form; ``pca-mixture``, several of these per class; or ``ddpm``: a diffusion model per class, which needs
            the extra ``[ddpm]``.
        pca_dims: dimensions of each Gaussian; 0 means 32 for one and 16 for each of a mixture.
        pca_components: Gaussians of a mixture.
        ddpm_epochs: epochs per update, in place of ``sub_generator_epochs`` (4000 for CIFAR, 6000 for ImageNet).
        ddpm_width: channels of the denoiser at full resolution (Ho et al.'s for CIFAR-10, as the next two).
        ddpm_batch_size: samples per step.
        ddpm_learning_rate: of its Adam.
        ddpm_sampling_steps: calls of the denoiser per sample.
        sub_generators_travel_as: ``float32``: as they are, or ``float16``.
        serve: ``downloaded``: what the aggregator made for the client (the paper), or ``best``: of that, its other
            models, the client's own and the one that it serves, whatever proves best on its evidence, a tenth of each
            round's samples and replay (``docs/serving.md``).
        smooth_share: of a round's samples so many are learned once more as replay looks (``steps/looks.py``).
        detail_share: of the replay so much gets the fine detail of a sample of the round.
    """

    __slots__ = ()

    task: TaskSpec
    filter_replay: bool = True
    max_tries_factor: int = 8
    generators: str = "per-class"
    gate: bool = True
    gate_threshold: float = 0.25
    gate_samples: int = 256
    sub_generator_epochs: int = 200
    first_sub_generator_epochs: int = 0
    gan_batch_size: int = 64
    gan_learning_rate: float = 1e-4
    gan_beta1: float = 0.5
    gan_beta2: float = 0.9
    critic_steps_per_generator_step: int = 5
    sub_generator: str = "wgan-gp"
    pca_dims: int = 0
    pca_components: int = 4
    ddpm_epochs: int = 4000
    ddpm_width: int = 128
    ddpm_batch_size: int = 128
    ddpm_learning_rate: float = 2e-4
    ddpm_sampling_steps: int = 20
    sub_generators_travel_as: str = "float32"
    serve: str = "downloaded"
    smooth_share: float = 0.0
    detail_share: float = 0.0

    def check_memory(self) -> None:
        """Raise ValueError if a setting is impossible, or contradicts another."""
        checks.one_of(travel.SUB_GENERATORS, self, "sub_generators_travel_as")
        checks.one_of(("per-class", "single"), self, "generators")
        checks.one_of(("downloaded", "best"), self, "serve")
        checks.one_of(SUB_GENERATORS, self, "sub_generator")
        checks.at_least(0, self, ["sub_generator_epochs", "first_sub_generator_epochs", "ddpm_epochs"])
        counts = ["max_tries_factor", "gate_samples", "gan_batch_size", "critic_steps_per_generator_step"]
        checks.at_least(1, self, [*counts, "ddpm_width", "ddpm_batch_size", "ddpm_sampling_steps"])
        checks.within(0.0, math.inf, self, ["gan_learning_rate", "ddpm_learning_rate"])
        checks.within(0.0, 1.0, self, ["gan_beta1", "gan_beta2"])
        checks.within(0.0, 2.0, self, ["gate_threshold"])
        checks.within(0.0, 1.0, self, ["smooth_share", "detail_share"])
        if self.ddpm_width > 32 and self.ddpm_width % 32:
            raise ValueError(f"ddpm_width is {self.ddpm_width}, expected a multiple of 32, or less than 32")
        if self.sub_generator == "ddpm":
            require_diffusers()
            if self.generators == "single":
                raise ValueError("sub_generator is 'ddpm', but one generator of all classes is only a WGAN-GP here")
        if self.sub_generator in _MIXTURES:
            self._mixture()  # refuses sizes that no mixture has
            if self.generators == "single":
                raise ValueError(f"sub_generator is {self.sub_generator!r}, which draws one class; expected 'wgan-gp'")
        if self.generators == "single" and not self.filter_replay:
            raise ValueError("generators is 'single', whose samples only the filter can label; expected filter_replay")
        if self.generators == "single" and (self.smooth_share or self.detail_share):
            raise ValueError(
                "generators is 'single', which learns replay too; expected smooth_share and detail_share 0"
            )
        if self.generators == "single" and self.serve == "best":
            raise ValueError("serve is 'best', which judges models by replay of single classes; expected 'per-class'")

    def idle_settings(self) -> dict[str, str]:
        """Return the settings that do nothing beside the others, each with why."""
        kind = f"sub_generator is {self.sub_generator!r}"
        idle = {name: kind for name, kinds in _OF_KINDS.items() if self.sub_generator not in kinds}
        if self.generators == "single":
            idle |= dict.fromkeys(("gate", "gate_threshold", "gate_samples"), "generators is 'single'")
        elif not self.gate:
            idle |= dict.fromkeys(("gate_threshold", "gate_samples"), "gate is false")
        if not self.filter_replay:
            idle["max_tries_factor"] = "filter_replay is false"
        return idle

    def _mixture(self) -> MixtureSpec:
        if self.sub_generator == "pca-gaussian":
            return MixtureSpec(self.task, self.pca_dims or 32, 1)
        return MixtureSpec(self.task, self.pca_dims or 16, self.pca_components)

    def sub_generator_kind(self) -> SubGeneratorKind:
        """Return how this method's sub-generators are made, trained and drawn from."""
        spec = self.task
        if self.sub_generator in _MIXTURES:
            return Mixture(spec=self._mixture())
        if self.sub_generator == "ddpm":
            return Ddpm(
                spec=spec,
                width=self.ddpm_width,
                batch_size=self.ddpm_batch_size,
                learning_rate=self.ddpm_learning_rate,
                num_sampling_steps=self.ddpm_sampling_steps,
            )
        if self.generators == "single":
            spec = replace(spec, generator_width=2 * spec.generator_width)
        return WganGp(
            spec=spec,
            batch_size=self.gan_batch_size,
            learning_rate=self.gan_learning_rate,
            betas=(self.gan_beta1, self.gan_beta2),
            critic_steps_per_generator_step=self.critic_steps_per_generator_step,
        )

    def most_met(self, seen: int) -> int:
        """Return how many images of a class a mixture may have met, but for one a component, if so many were seen."""
        return seen

    def holds(self, key: int) -> bool:
        """Whether ``key`` is one that this method's sub-generators are kept under."""
        return key == ALL_CLASSES if self.generators == "single" else 0 <= key < self.task.num_classes


def kind_of(method: object) -> SubGeneratorKind | None:
    """Return how a method's sub-generators are made and drawn from, or None for a method without a memory."""
    return method.sub_generator_kind() if isinstance(method, MemorySettings) else None


def sampler_of(method: Any) -> Sampler:
    """Return what runs a method's sub-generators in PyTorch; a method without a memory gets one all the same.

    Of detection tasks there are no sub-generators: there it raises ValueError when it is asked to draw.
    """
    kind = kind_of(method)
    if isinstance(method.task, DetectionSpec):
        return _no_sampler
    return eager_sampler(method.task) if kind is None else kind.sampler()


def _no_sampler(_parameters: Parameters) -> Draw:
    raise ValueError("a detection task has no sub-generators, and nothing to draw from")


@dataclass(frozen=True, slots=True)
class MixedData:
    """A round's real samples and the replay beside them.

    Attributes:
        real: the samples of this round.
        replay: of classes met earlier.
        smoothed: some of the real ones once more, as replay looks; None for none.
    """

    real: RoundData
    replay: Replay
    smoothed: RoundData | None = None

    def joined(self) -> RoundData:
        """Return all samples, real ones first, replay last."""
        device = self.real.images.device  # replay of nothing, or from an exported sub-generator, is on the CPU
        own = [self.real] if self.smoothed is None else [self.real, self.smoothed]
        images = torch.cat([*(part.images for part in own), self.replay.images.to(device)])
        return RoundData(images, torch.cat([*(part.labels for part in own), self.replay.labels.to(device)]))


def with_replay(
    settings: MemorySettings, memory: Memory, data: RoundData, judge: Judge, rng: torch.Generator, sampler: Sampler
) -> MixedData:
    """Replay classes met earlier at the generation scale (4.1.4), as ``judge`` recognises them (4.1.3).

    Args:
        settings: of the memory.
        memory: before the round.
        data: this round's samples.
        judge: the task model that the client downloaded.
        rng: source of latents.
        sampler: runs sub-generators.
    """
    generators = {c: sub_generator.generator for c, sub_generator in memory.sub_generators.items()}
    counts = drawable(generators, generation_scale(memory.seen_with(data), data.counts()))  # 4.1.4
    return looking_alike(settings, data, draw(settings, generators, counts, judge, rng, sampler), rng)


def looking_alike(settings: MemorySettings, data: RoundData, replay: Replay, rng: torch.Generator) -> MixedData:
    """Return a round's samples and replay, of each as much in the other's looks as the settings say."""
    copies = None
    if len(replay.labels) and settings.smooth_share:
        copies = smoothed(data, settings.smooth_share, rng)
    if len(replay.labels) and settings.detail_share:
        replay = partly_detailed(replay, data.images, settings.detail_share, rng)
    return MixedData(data, replay, copies)


def drawable(generators: Mapping[int, Parameters], counts: Mapping[int, int]) -> dict[int, int]:
    """Return the counts of those classes that some generator draws."""
    return {c: count for c, count in counts.items() if c in generators or ALL_CLASSES in generators}


def draw(
    settings: MemorySettings,
    generators: Mapping[int, Parameters],
    counts: Mapping[int, int],
    judge: Judge,
    rng: torch.Generator,
    sampler: Sampler,
) -> Replay:
    """Draw ``counts[c]`` samples of each class, which must be ``drawable``, as ``judge`` recognises them."""
    factor = settings.max_tries_factor
    if ALL_CLASSES in generators:
        bound = sampler(generators[ALL_CLASSES])
        return draw_labelled_replay(bound, counts, judge, rng, spec=settings.task, max_tries_factor=factor)
    filtering = judge if settings.filter_replay else None
    return draw_replay(generators, counts, sampler, filtering, rng, spec=settings.task, max_tries_factor=factor)


@dataclass(frozen=True, slots=True)
class Retraining:
    """One sub-generator that a round trains.

    Attributes:
        start: where training starts.
        images: (B, C, H, W), what it learns.
        num_epochs: passes over them.
        rng: draws batches and latents.
        recognised: share of what it draws that the gate recognised; None if it was never trained, or wasn't judged.
        can_wait: as in ``pace.Stage``.
    """

    start: SubGenerator
    images: Tensor
    num_epochs: int
    rng: torch.Generator
    recognised: float | None = None
    can_wait: bool = False

    def stage(self, kind: SubGeneratorKind) -> Stage:
        """Return its length."""
        return Stage(self.num_epochs, steps_per_epoch(len(self.images), kind.batch_size), self.can_wait)


def first_trainings(settings: MemorySettings, memory: Memory, mixed: MixedData) -> tuple[Stage, ...]:
    """Return the sub-generators whose training can't wait, which is known before the gate looks."""
    size = settings.sub_generator_kind().batch_size
    if settings.generators == "single":
        first = ALL_CLASSES not in memory.sub_generators
        num_samples = len(mixed.real.labels) + len(mixed.replay.labels)
        return (Stage(epochs_of(settings, first=first), steps_per_epoch(num_samples, size)),)
    epochs = epochs_of(settings, first=True)
    new = {c: count for c, count in mixed.real.counts().items() if c not in memory.sub_generators}
    return tuple(Stage(epochs, steps_per_epoch(count, size)) for count in new.values())


def retrainings(
    settings: MemorySettings,
    memory: Memory,
    mixed: MixedData,
    judge: Judge,
    rng: torch.Generator,
    sampler: Sampler,
    donors: Mapping[int, Parameters] | None = None,
) -> dict[int, Retraining]:
    """Return which sub-generators this round trains: of its classes, those that drifted (4.1.1 and 4.1.2).

    A single generator of all classes is trained in every round, on real samples and the replay that its frozen
    predecessor drew (Fig. 1a).

    Args:
        settings: of the memory.
        memory: before the round.
        mixed: what the task model was trained on.
        judge: the task model after its local round, which the gate asks.
        rng: draws what the gate looks at, first parameters, batches, latents.
        sampler: runs sub-generators.
        donors: class id -> another client's sub-generator to start a new class from; None for none.
    """
    kind, donors = settings.sub_generator_kind(), donors or {}
    if settings.generators == "single":
        known = memory.sub_generators.get(ALL_CLASSES)
        epochs = epochs_of(settings, first=known is None)
        images = mixed.joined().images
        return {ALL_CLASSES: Retraining((known or kind.new(rng)).on(images.device), images, epochs, rng)}
    drifted: dict[int, Retraining] = {}
    for class_id in sorted(mixed.real.counts()):
        own_rng = split_generator(rng)
        known, share = memory.sub_generators.get(class_id), None
        if known is not None and settings.gate:
            # 4.1.2: the gate asks the new model about what the sub-generator draws: ACC_c against TH_G
            share = recognised_share(sampler(known.generator), class_id, judge, own_rng, settings.gate_samples)
            if share >= settings.gate_threshold:
                continue
        images = mixed.real.images[mixed.real.labels == class_id]
        start = kind.new(own_rng) if known is None else _counted(settings, known, memory.seen.get(class_id, 0))
        if known is None and class_id in donors:
            donor = donors[class_id]
            start = replace(start, generator=counted_as(donor, len(images)) if isinstance(kind, Mixture) else donor)
        epochs = epochs_of(settings, first=known is None and class_id not in donors)
        drifted[class_id] = Retraining(
            start.on(images.device), images, epochs, own_rng, share, can_wait=known is not None
        )
    return drifted


def _counted(settings: MemorySettings, known: SubGenerator, seen: int) -> SubGenerator:
    """Return a sub-generator that counts no more images than were seen, as a mixture of a round that is trained again.

    Moments can't forget an image: learned once more without this, each would count twice. What they cost stays.
    """
    counts = known.generator.get("num_samples")
    if counts is None or int(counts.sum()) <= settings.most_met(seen) + len(counts):
        return known
    return replace(known, generator=counted_as(known.generator, settings.most_met(seen)))


def train_all(kind: SubGeneratorKind, work: Sequence[Retraining], *, as_one: bool | None = None) -> list[SubGenerator]:
    """Return sub-generators of one kind after training, in the order of the work.

    Args:
        kind: of all of them.
        work: what to train.
        as_one: train those of a WGAN-GP as one network, unless with DP-SGD. None does so on a GPU; a CPU gains nothing
            from it (``benchmarks/results/grouped_training.json``).
    """
    if as_one is None:
        as_one = any(one.images.device.type != "cpu" for one in work)
    if not as_one or not isinstance(kind, WganGp) or kind.privacy is not None:
        return [kind.train(one.start, one.images, one.num_epochs, one.rng) for one in work]

    def as_one_network(alike: list[Retraining]) -> list[SubGenerator]:
        jobs = [SubGeneratorJob(one.start, one.images, one.rng) for one in alike]
        return train_sub_generators(kind.spec, jobs, kind.schedule(alike[0].num_epochs))

    return by_groups(work, lambda one: one.num_epochs, as_one_network)


def train_in_time(kind: SubGeneratorKind, work: Sequence[Retraining], pace: Pace) -> list[SubGenerator | None]:
    """Return sub-generators after as much training as ``pace`` allows, in the order of the work; None: not now.

    Those that can't wait come first, with most samples first; then those that can, worst recognised first. Each draws
    from its own random numbers, so the order changes no result.
    """

    def urgency(place: int) -> tuple[bool, float, int]:
        one = work[place]
        return one.can_wait, one.recognised or 0.0, -len(one.images)

    order = sorted(range(len(work)), key=urgency)
    stages = [work[place].stage(kind) for place in order]
    trained: list[SubGenerator | None] = [None] * len(work)
    for turn, place in enumerate(order):
        should_stop = pace.sub_generator(stages[turn], stages[turn + 1 :])
        if should_stop is not None:
            one = work[place]
            trained[place] = kind.train(one.start, one.images, one.num_epochs, one.rng, should_stop)
    return trained


def epochs_of(settings: MemorySettings, *, first: bool) -> int:
    """Return for how many epochs a sub-generator is trained, its ``first`` time or a later one."""
    if settings.sub_generator in _MIXTURES:
        return 1
    later = settings.ddpm_epochs if settings.sub_generator == "ddpm" else settings.sub_generator_epochs
    return (settings.first_sub_generator_epochs if first else 0) or later
