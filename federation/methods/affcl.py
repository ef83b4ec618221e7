"""AF-FCL: a normalising flow replays features, and replay counts by how well it agrees with this round's data.

Wuerkaixi et al. 2024, "Accurate Forgetting for Heterogeneous Federated Continual Learning" (ICLR), in the real-time
protocol of pFedGRP (its appendices B.1 and B.2): every round is a new task of its own, so the last model and flow are
the global ones that the round begins with, and a client remembers nothing itself.
Differences from the paper: ``docs/methods/affcl.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from replayfleet.federation.methods import affcl_records as aff
from replayfleet.federation.methods.kit import checks, packing
from replayfleet.federation.methods.kit.records import ClientId, Judge, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import NoState
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.steps.flow_replay import (
    REPLAY_LAYERS,
    FlowModels,
    FlowReplaySchedule,
    build_flow,
    train_with_flow,
)
from replayfleet.federation.methods.steps.modules import judge_of
from replayfleet.federation.methods.task_method import in_order_with_shares
from replayfleet.models.build import initialise
from replayfleet.models.flow import initialise_flow
from replayfleet.models.resnet_plus import build_resnet_plus
from replayfleet.models.specs import TaskSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class AFFCL:
    """Settings and both halves of the method; defaults are the released code's, the flow's size pFedGRP's.

    Attributes:
        task: the classification task.
        flow_hidden: units of the flow's networks.
        local_iterations: mini-batches per round ("epochs" in the papers).
        replay_batch_size: samples per mini-batch, of real data and of replayed features each.
        adam_learning_rate: of the task model's Adams.
        flow_learning_rate: of the flow's Adam.
        replay_weight: of the loss on replayed features.
        exploration: theta: least share of the replay's class loss, however improbable the replay is.
        last_flow_weight: k: of the flow's loss on samples of the last flow.
        distillation: of all distillation from the last task model.
        feature_distillation: of its term on features.
        output_distillation: of its terms on outputs.
        replay_layers: what replayed features train, ``upper`` (all above the features) or ``fc2`` (the released code).
    """

    name: ClassVar[str] = "affcl"
    stores_data: ClassVar[bool] = False
    deployable: ClassVar[bool] = False
    Upload: ClassVar[type[Any]] = aff.Upload
    Download: ClassVar[type[Any]] = aff.Download
    ClientState: ClassVar[type[Any]] = NoState
    AggregatorState: ClassVar[type[Any]] = aff.AggregatorState

    task: TaskSpec
    flow_hidden: int = 512
    local_iterations: int = 100
    replay_batch_size: int = 64
    adam_learning_rate: float = 1e-4
    flow_learning_rate: float = 1e-4
    replay_weight: float = 0.1
    exploration: float = 0.2
    last_flow_weight: float = 0.4
    distillation: float = 0.2
    feature_distillation: float = 0.5
    output_distillation: float = 0.1
    replay_layers: str = "upper"

    def __post_init__(self) -> None:
        checks.task_kind(self)
        checks.at_least(1, self, ["flow_hidden", "local_iterations"])
        checks.at_least(2, self, ["replay_batch_size"])
        checks.within(0.0, 1.0, self, ["exploration"])
        checks.within(
            0.0,
            math.inf,
            self,
            [
                "adam_learning_rate",
                "flow_learning_rate",
                "replay_weight",
                "last_flow_weight",
                "distillation",
                "feature_distillation",
                "output_distillation",
            ],
        )
        checks.one_of(REPLAY_LAYERS, self, "replay_layers")

    def initial_states(self) -> tuple[NoState, aff.AggregatorState]:
        """Return (a client's state, the aggregator's state) before round 0: nothing, and nobody known."""
        return NoState(), aff.AggregatorState()

    def initial_download(self, rng: torch.Generator) -> aff.Download:
        """Return one random task model and flow, which know no classes."""
        module = initialise(build_resnet_plus(self.task).to_empty(device="cpu"), rng)
        flow = initialise_flow(build_flow(self.task, self.flow_hidden).to_empty(device="cpu"), rng)
        return aff.Download(FlowModels(module.state_dict(), flow.state_dict()))

    def local_round(
        self, state: NoState, data: RoundData, download: aff.Download, rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[NoState, aff.Upload]:
        """Train flow and task model in turns, mini-batch by mini-batch, on this round's data and replayed features."""
        del sampler
        models = train_with_flow(self.task, download.models, data, download.classes, self._schedule(), rng)
        return state, aff.Upload(models, data.counts())

    def aggregate(
        self,
        state: aff.AggregatorState,
        uploads: Mapping[ClientId, aff.Upload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[aff.AggregatorState, dict[ClientId, aff.Download]]:
        """Average task models and flows by the number of samples behind each.

        Raises:
            ValueError: There are no uploads.
        """
        del rng, sampler
        ordered, shares = in_order_with_shares(uploads)
        models = FlowModels(
            weighted_average([upload.models.task for upload in ordered], shares),
            weighted_average([upload.models.flow for upload in ordered], shares),
        )
        earlier = state.latest.classes if state.latest else ()
        classes = tuple(sorted({*earlier, *(c for upload in ordered for c, count in upload.now.items() if count > 0)}))
        clients = tuple(sorted({*state.clients, *uploads}))
        latest = aff.Download(models, classes)
        return aff.AggregatorState(clients, latest), dict.fromkeys(clients, latest)

    def download_for(self, state: aff.AggregatorState, client_id: ClientId, initial: aff.Download) -> aff.Download:
        """Return the global models, which are everybody's; ``initial`` before the first aggregation."""
        del client_id
        return state.latest or initial

    def upload_layout(self, name: str) -> Parameters | None:
        """Return the layout of ``task`` or ``flow``; None for other names."""
        if name == "task":
            return packing.layout(build_resnet_plus(self.task))
        return packing.layout(build_flow(self.task, self.flow_hidden)) if name == "flow" else None

    def check_upload(self, upload: aff.Upload) -> None:
        """Raise ValueError if counts are impossible."""
        packing.check_counts(upload.now, self.task.num_classes)

    def predictor(self, download: aff.Download) -> Judge:
        """Return what a client with this download answers: the task model with its two more layers."""
        return judge_of(build_resnet_plus(self.task), download.models.task, self.task.num_classes)

    def _schedule(self) -> FlowReplaySchedule:
        return FlowReplaySchedule(
            flow_hidden=self.flow_hidden,
            num_batches=self.local_iterations,
            batch_size=self.replay_batch_size,
            learning_rate=self.adam_learning_rate,
            flow_learning_rate=self.flow_learning_rate,
            replay_weight=self.replay_weight,
            exploration=self.exploration,
            last_flow_weight=self.last_flow_weight,
            distillation=self.distillation,
            feature_distillation=self.feature_distillation,
            output_distillation=self.output_distillation,
            replay_layers=self.replay_layers,
        )
