"""pFedGRP: real-time personalised federated continual learning with generative replay.

"Real-Time Personalized Federated Continuous Learning via Generative Replay", sections 4.1 and 4.2 and Appendix D.
Differences from the paper: ``docs/methods/pfedgrp.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from replayfleet.federation.methods import pfedgrp_records as grp
from replayfleet.federation.methods.kit import checks, packing, privacy
from replayfleet.federation.methods.kit.each import each
from replayfleet.federation.methods.kit.records import ClientId, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.lockstep import TrainSubGenerators, TrainTaskModel, Work
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.steps.dp_sgd import DpSgd
from replayfleet.federation.methods.steps.grouped_task_model import TaskModelJob
from replayfleet.federation.methods.steps.memory import (
    MemorySettings,
    MixedData,
    Retraining,
    draw,
    drawable,
    first_trainings,
    retrainings,
    with_replay,
)
from replayfleet.federation.methods.steps.personalisation.mixtures import nearest, personalise_all
from replayfleet.federation.methods.steps.personalisation.personalise import StackedParameters, WeightSearch
from replayfleet.federation.methods.steps.replay import Replay, counts_for_distribution
from replayfleet.federation.methods.steps.robust import RobustSettings, robust_average
from replayfleet.federation.methods.steps.sub_generators.gaussian import tells_more
from replayfleet.federation.methods.steps.sub_generators.kinds import Mixture, SubGeneratorKind
from replayfleet.federation.methods.steps.task_model import Alignment, Optimisation, judge_with
from replayfleet.federation.methods.task_method import TaskMethod, require_uploads
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PFedGRP(TaskMethod, MemorySettings, RobustSettings):
    """Settings and both halves of the method; defaults are the paper's (appendix B.2) where it states them.

    Those of the task model are ``TaskMethod``'s, those of replay and sub-generators ``MemorySettings``', those of a
    robust average ``RobustSettings``'.

    Attributes:
        alignment_weight: lambda of Eq. 2; 0 is ablation ASG.
        alignment_on: ``replay`` (Eq. 2), or ``earlier-classes``: replay and those real samples whose class was met in
            an earlier round (first version of the paper).
        start_from: ``average`` or ``personalised`` (ablation ASP): where local training starts.
        warm_start: start a class that is new to a client from another client's cached sub-generator (first version).
            This shows one client's data to another, so it is off unless the operator turns it on.
        replay_per_client: samples that Eq. 3 is solved on.
        aggregation_filter: who filters that replay: the client's ``own`` model (the paper), which favours weights
            near 1 for itself, or the round's ``average`` model.
        aggregation_epochs: epochs of Eq. 3's descent.
        aggregation_batch_size: samples per step of Eq. 3's descent.
        aggregation_learning_rate: step size on the weights.
        aggregation_momentum: of Eq. 3's descent.
        aggregation_neighbours: mix each client's model with those of so many others whose classes are most like its
            own; 0 mixes with all, as the paper does, at a cost that grows with their number.
        aggregation_patience: end Eq. 3's descent after this many epochs without progress; 0 runs all epochs.
        dp_noise_multiplier: train sub-generators with DP-SGD and this much noise, over ``dp_max_grad_norm``, or learn
            Gaussians from moments with as much, over what one image can change of them; 0 without.
            Needs the extra ``[dp]`` where sub-generators are trained. ``docs/privacy.md`` says what it promises.
        dp_max_grad_norm: to which one sample's gradient is clipped.
        dp_delta: for which epsilon is told.
        dp_max_epsilon: a class's sub-generator isn't trained again where its epsilon might pass this; 0 for no bound.
        upload_growth: upload a mixture of Gaussians again once it has met so many times as many images as the one that
            the aggregator holds, or shows them elsewhere; 1, and other kinds: whenever it changed.
        mix_absent: let cached models of clients that missed the round take part in mixing (asynchronous rounds);
            if False they are only served. Absent clients get a download either way.
        staleness_exponent: with ``mix_absent``, a cached model of t rounds ago counts (1 + t)^-staleness_exponent of a
            new one in the average (0.5 in FedBuff, Nguyen et al. 2022); 0: as much as a new one.
    """

    name: ClassVar[str] = "pfedgrp"
    trains_as_one: ClassVar[bool] = True
    Upload: ClassVar[type[Any]] = grp.Upload
    Download: ClassVar[type[Any]] = grp.Download
    ClientState: ClassVar[type[Any]] = grp.ClientState
    AggregatorState: ClassVar[type[Any]] = grp.AggregatorState

    task: TaskSpec
    alignment_weight: float = 0.3
    alignment_on: str = "replay"
    start_from: str = "average"
    warm_start: bool = False
    replay_per_client: int = 1000
    aggregation_filter: str = "own"
    aggregation_epochs: int = 20
    aggregation_batch_size: int = 64
    aggregation_learning_rate: float = 0.01
    aggregation_momentum: float = 0.9
    aggregation_neighbours: int = 0
    aggregation_patience: int = 0
    upload_growth: float = 1.0
    mix_absent: bool = False
    staleness_exponent: float = 0.0
    dp_noise_multiplier: float = 0.0
    dp_max_grad_norm: float = 1.0
    dp_delta: float = 1e-5
    dp_max_epsilon: float = 0.0

    def __post_init__(self) -> None:
        TaskMethod.__post_init__(self)
        self.check_memory()
        checks.one_of(("replay", "earlier-classes"), self, "alignment_on")
        checks.one_of(("average", "personalised"), self, "start_from")
        checks.one_of(("own", "average"), self, "aggregation_filter")
        checks.at_least(0, self, ["aggregation_patience", "aggregation_neighbours"])
        checks.at_least(1, self, ["replay_per_client", "aggregation_epochs", "aggregation_batch_size"])
        checks.within(0.0, math.inf, self, ["alignment_weight", "aggregation_learning_rate", "staleness_exponent"])
        checks.within(0.0, 1.0, self, ["aggregation_momentum"])
        checks.within(0.0, math.inf, self, ["dp_max_epsilon"])
        checks.within(1.0, math.inf, self, ["upload_growth"])
        if self.staleness_exponent and not (self.mix_absent and self.robust == "none"):
            raise ValueError("staleness_exponent weighs cached models; expected mix_absent=true and robust='none'")
        if self.dp_noise_multiplier != 0:
            checks.at_least(1, self, ["sub_generator_epochs", "ddpm_epochs"])
            if self.sub_generator == "pca-mixture":
                raise ValueError(
                    "dp_noise_multiplier is set, but what is in which cluster of 'pca-mixture' isn't hidden; "
                    "expected sub_generator 'pca-gaussian', 'wgan-gp' or 'ddpm'"
                )
            checks.within(*privacy.NOISE, self, ["dp_noise_multiplier"])
            checks.within(*privacy.DELTA, self, ["dp_delta"])
            checks.within(1e-6, 1e6, self, ["dp_max_grad_norm"])
            if self.generators == "single":
                raise ValueError("dp_noise_multiplier is set; expected generators='per-class': accounts are by class")
        if self.warm_start and self.generators == "single":
            raise ValueError("warm_start hands over sub-generators by class; expected generators='per-class'")

    def initial_download(self, rng: torch.Generator) -> grp.Download:
        """Return one random task model as personalised and average model (Appendix D, line 3)."""
        parameters = initialise(build_task_model(self.task), rng).state_dict()
        return grp.Download(personalised=parameters, average=parameters)

    def local_work(
        self, state: grp.ClientState, data: RoundData, download: grp.Download, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[grp.ClientState, grp.Upload]]:
        """Train the task model on this round's data and replay (Eq. 2), then the drifted sub-generators (4.1.2)."""
        if self.dp_noise_multiplier:
            privacy.require_opacus()
        spent = download.privacy.histories if download.privacy else {}
        given = (*download.donors.items(), *download.sub_generators.items())
        self._check_given([(c, one) for c, one in given if c not in state.sub_generators])
        state = state.recovered_from(download.sub_generators, download.seen, spent)
        judge = judge_with(self.task, download.personalised)
        mixed = with_replay(self, state, data, judge, split_generator(rng), sampler)
        training = self._training(mixed, frozenset(state.seen), download, split_generator(rng))
        parameters = yield replace(training, ahead=first_trainings(self, state, mixed))

        judge = judge_with(self.task, parameters)  # 4.1.2: the gate asks the new model
        work = retrainings(self, state, mixed, judge, split_generator(rng), sampler, download.donors)
        work = {class_id: one for class_id, one in work.items() if self._affords(one)}
        trained = yield TrainSubGenerators(self.sub_generator_kind(), list(work.values()))
        updated = {key: result for key, result in zip(work, trained, strict=True) if result is not None}
        new_state = state.after(data, updated)
        upload = grp.Upload(
            task_parameters=parameters,
            sub_generators=self._unknown_to(download, new_state),
            seen=new_state.seen,
            num_samples=len(data.labels),
            num_updates=len(updated),
            num_filled=mixed.replay.num_filled,
            privacy=self._account(new_state),
        )
        return new_state, upload

    def aggregate(
        self,
        state: grp.AggregatorState,
        uploads: Mapping[ClientId, grp.Upload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[grp.AggregatorState, dict[ClientId, grp.Download]]:
        """Replay every client's distribution, solve Eq. 3 for it, and average all (section 4.2, Global Aggregating)."""
        require_uploads(uploads)
        clients = dict(state.clients)
        for client_id, upload in sorted(uploads.items()):
            clients[client_id] = grp.ClientRecord.merged(clients.get(client_id), upload)
        for client_id in sorted(clients.keys() - uploads.keys()):
            clients[client_id] = replace(clients[client_id], num_missed=clients[client_id].num_missed + 1)
        mixed_ids = sorted(clients if self.mix_absent else uploads)
        models = [clients[client_id].task_parameters for client_id in mixed_ids]
        average, trusted, even_weights = self._average(models, [clients[one].num_missed for one in mixed_ids])

        replayed = [c for c in mixed_ids if any(drawable(clients[c].sub_generators, clients[c].seen).values())]

        def replay(drawn: tuple[ClientId, torch.Generator]) -> tuple[int, Replay]:
            client_id, own_rng = drawn
            return mixed_ids.index(client_id), self._client_replay(clients[client_id], average, own_rng, sampler)

        replays = each(replay, [(client_id, split_generator(rng)) for client_id in replayed])
        near = None
        if self.aggregation_neighbours:
            near = nearest([clients[client_id].seen for client_id in mixed_ids], self.aggregation_neighbours)
        # Eq. 3, for each client on its own replay
        mixtures = personalise_all(
            self.task, StackedParameters(models), replays, self.weight_search(), split_generator(rng), trusted, near
        )
        even = grp.Personalised(average, dict(zip(mixed_ids, even_weights, strict=True)))
        for client_id, mixture in zip(replayed, mixtures, strict=True):
            weights = with_own(mixture.weights, mixed_ids.index(client_id), clients[client_id].own_share)
            mixed = self._mixed(mixed_ids, models, weights)
            chosen = self._chosen(client_id, clients[client_id], mixed, even, sampler, rng)
            clients[client_id] = clients[client_id].personalised_with(chosen)
        for client_id in set(mixed_ids) - set(replayed):
            clients[client_id] = clients[client_id].personalised_with(even)
        new_state = grp.AggregatorState(clients=dict(sorted(clients.items())), average=average)
        return new_state, {client_id: self._download(new_state, client_id) for client_id in new_state.clients}

    def download_for(self, state: grp.AggregatorState, client_id: ClientId, initial: grp.Download) -> grp.Download:
        if client_id in state.clients:
            return self._download(state, client_id)
        if not state.average:
            return initial
        return grp.Download(
            personalised=state.average, average=state.average, donors=self._donors(state, client_id, frozenset())
        )

    def upload_layout(self, name: str) -> Parameters | None:
        match packing.place_of(grp.Upload, name):
            case "task", _:
                return self.task_layout()
            case _, class_id if self.holds(class_id):
                return self.sub_generator_kind().layout()
        return None

    def check_upload(self, upload: grp.Upload) -> None:
        packing.check_counts(upload.seen, self.task.num_classes)
        if upload.num_samples > sum(upload.seen.values()):
            raise ValueError(
                f"{upload.num_samples} samples in this round, but only {sum(upload.seen.values())} seen in all"
            )
        stray = sorted(upload.sub_generators.keys() - upload.seen.keys() - {packing.ALL_CLASSES})
        if stray:
            raise ValueError(f"class {stray[0]} has a sub-generator but no samples were seen of it")
        kind = self.sub_generator_kind()
        for class_id, parameters in upload.sub_generators.items():
            kind.check(parameters)
            if isinstance(kind, Mixture):
                most = self.most_met(upload.seen[class_id]) + kind.spec.num_components
                if (met := int(parameters["num_samples"].sum())) > most:
                    raise ValueError(f"the mixture of class {class_id} met {met} images, expected at most {most}")
        self._check_privacy(upload)

    def _check_given(self, sub_generators: Sequence[tuple[int, Parameters]]) -> None:
        """Raise ValueError for sub-generators that none of this method's are: what enters the memory stays there."""
        kind = self.sub_generator_kind()
        expected = {name: (one.shape, one.dtype) for name, one in kind.layout().items()} if sub_generators else {}
        for class_id, parameters in sub_generators:
            if not self.holds(class_id) or {n: (t.shape, t.dtype) for n, t in parameters.items()} != expected:
                raise ValueError(f"the download's sub-generator of class {class_id} is none of this fleet's")
            if not all(bool(one.isfinite().all()) for one in parameters.values()):
                raise ValueError(f"the download's sub-generator of class {class_id} holds numbers that aren't finite")
            kind.check(parameters)

    def _check_privacy(self, upload: grp.Upload) -> None:
        """Raise ValueError unless a fleet with DP-SGD hears what every sub-generator cost, and one without nothing."""
        if upload.privacy is None:
            if self.dp_noise_multiplier:
                raise ValueError("nothing is said of privacy, but sub-generators of this fleet are trained with DP-SGD")
            return
        if not self.dp_noise_multiplier or upload.privacy.delta != self.dp_delta:
            raise ValueError(f"an account of privacy at delta {upload.privacy.delta:g} isn't what this fleet agreed on")
        known = upload.privacy.epsilons.keys()
        stray = sorted(known - upload.seen.keys()) + sorted(upload.sub_generators.keys() - known)
        if stray:
            raise ValueError(f"class {stray[0]} has an account of privacy without samples, or a sub-generator without")

    def sub_generator_kind(self) -> SubGeneratorKind:
        """Return ``MemorySettings``' kind, trained with DP-SGD where that is set."""
        kind = MemorySettings.sub_generator_kind(self)
        if not self.dp_noise_multiplier:
            return kind
        private = DpSgd(noise_multiplier=self.dp_noise_multiplier, max_grad_norm=self.dp_max_grad_norm)
        return replace(kind, privacy=private)  # type: ignore[type-var]

    def most_met(self, seen: int) -> int:
        return seen * (2 if self.warm_start else 1)  # a donor's count as much as one's own

    def _unknown_to(self, download: grp.Download, memory: grp.ClientState) -> dict[int, Parameters]:
        """Return the sub-generators that the aggregator doesn't hold, as far as its download tells."""
        held = download.sub_generators
        current = {c: sub_generator.generator for c, sub_generator in memory.sub_generators.items()}
        return {c: own for c, own in current.items() if c not in held or self._tells_more(own, held[c])}

    def _tells_more(self, own: Parameters, held: Parameters) -> bool:
        """Whether a sub-generator is worth its bytes to who holds an earlier one."""
        if self.upload_growth > 1 and isinstance(self.sub_generator_kind(), Mixture):
            return tells_more(own, held, self.upload_growth)
        return not packing.same_bits(own, held)

    def _affords(self, one: Retraining) -> bool:
        """Whether a sub-generator may be trained, at full length, without passing ``dp_max_epsilon``."""
        planned = self.sub_generator_kind().planned(len(one.images), one.num_epochs)
        if planned is None or not self.dp_max_epsilon:
            return True
        history = privacy.composed(one.start.history, planned)
        return privacy.epsilon_of(history, self.dp_delta) <= self.dp_max_epsilon

    def _account(self, state: grp.ClientState) -> privacy.Account | None:
        if not self.dp_noise_multiplier:
            return None
        histories = {class_id: own.history for class_id, own in state.sub_generators.items()}
        return privacy.Account.of(histories, self.dp_delta)

    def _mixed(self, client_ids: Sequence[ClientId], models: Sequence[Parameters], weights: Tensor) -> grp.Personalised:
        """Return the models in these shares, of whom those of 0 aren't looked at. ``weights``: (N,)."""
        places, exact = weights.nonzero().flatten().tolist(), weights.to(torch.float64)
        shares = (exact / exact.sum())[places]
        told = places if self.aggregation_neighbours else range(len(client_ids))
        return grp.Personalised(
            weighted_average([models[place] for place in places], shares),
            {client_ids[place]: float(weights[place]) for place in told},
        )

    def _average(
        self, models: Sequence[Parameters], num_missed: Sequence[int]
    ) -> tuple[Parameters, tuple[int, ...], list[float]]:
        """Return omega_g, the places of those models that may take part in others' mixtures, and each one's share."""
        if self.robust == "none":
            # the plain mean, whatever the clients' volumes (section 4.2); cached models by FedBuff's s(t) = (1 + t)^-a
            weights = torch.tensor([(1 + t) ** -self.staleness_exponent for t in num_missed], dtype=torch.float64)
            weights /= weights.sum()
            return weighted_average(models, weights), tuple(range(len(models))), weights.tolist()
        found = robust_average(models, self.robust, self.hostile_share)
        shares = [float(place in found.trusted) / len(found.trusted) for place in range(len(models))]
        return found.parameters, found.trusted, shares

    def _chosen(
        self,
        client_id: ClientId,
        client: grp.ClientRecord,
        mixed: grp.Personalised,
        average: grp.Personalised,
        sampler: Sampler,
        rng: torch.Generator,
    ) -> grp.Personalised:
        """Return what a client is to serve: what Eq. 3 gives, always."""
        return mixed

    def _prior(self, mixed: MixedData) -> torch.Tensor | None:
        """Return what the loss adds to each class's logit, (K,); None for nothing."""
        return None

    def _client_replay(
        self, client: grp.ClientRecord, average: Parameters, rng: torch.Generator, sampler: Sampler
    ) -> Replay:
        filtering = client.task_parameters if self.aggregation_filter == "own" else average
        known = drawable(client.sub_generators, client.seen)
        counts = counts_for_distribution(known, self.replay_per_client)  # Eq. 3's D: as the client met the classes
        return draw(self, client.sub_generators, counts, judge_with(self.task, filtering), rng, sampler)

    def _training(
        self, mixed: MixedData, earlier: frozenset[int], download: grp.Download, rng: torch.Generator
    ) -> TrainTaskModel:
        joined = mixed.joined()
        images, labels = joined.images, joined.labels
        others = len(labels) - len(mixed.replay.labels)
        mask = torch.arange(len(labels), device=labels.device) >= others  # Eq. 2 aligns on the replay
        if self.alignment_on == "earlier-classes":
            mask |= torch.isin(labels, torch.tensor(sorted(earlier), dtype=torch.int64, device=labels.device))
        alignment = None
        if self.alignment_weight > 0 and bool(mask.any()):
            teacher = torch.zeros(len(labels), self.task.num_classes, device=labels.device)
            teacher[mask] = judge_with(self.task, download.personalised)(images[mask])
            alignment = Alignment(mask, teacher, self.alignment_weight)
        start = download.average if self.start_from == "average" else download.personalised
        return TrainTaskModel(
            self.task, TaskModelJob(start, images, labels, rng, alignment, self._prior(mixed)), Optimisation.of(self)
        )

    def weight_search(self) -> WeightSearch:
        """Return Eq. 3's descent, as it is set."""
        return WeightSearch(
            num_epochs=self.aggregation_epochs,
            batch_size=self.aggregation_batch_size,
            learning_rate=self.aggregation_learning_rate,
            momentum=self.aggregation_momentum,
            patience=self.aggregation_patience,
            precision=self.precision,
        )

    def _download(self, state: grp.AggregatorState, client_id: ClientId) -> grp.Download:
        client = state.clients[client_id]
        return grp.Download(
            personalised=client.personalised,
            average=state.average,
            sub_generators=client.sub_generators,
            seen=client.seen,
            weights=client.weights,
            donors=self._donors(state, client_id, frozenset(client.sub_generators)),
            privacy=client.privacy,
        )

    def _donors(self, state: grp.AggregatorState, client_id: ClientId, held: frozenset[int]) -> dict[int, Parameters]:
        """For each class a client hasn't met: the cached sub-generator of whoever saw most of it (first version)."""
        if not self.warm_start:
            return {}
        donors: dict[int, Parameters] = {}
        for class_id in range(self.task.num_classes):
            owners = [
                (-other.seen.get(class_id, 0), other_id)
                for other_id, other in state.clients.items()
                if other_id != client_id and class_id in other.sub_generators
            ]
            if owners and class_id not in held:
                donors[class_id] = state.clients[min(owners)[1]].sub_generators[class_id]
        return donors


def with_own(weights: Tensor, place: int, share: float) -> Tensor:
    """Return Eq. 3's weights, (N,), after the client at ``place`` got ``share`` of all: 0 leaves them as they are."""
    if not share:
        return weights
    own = torch.zeros_like(weights)
    own[place] = share
    return weights * (1 - share) + own
