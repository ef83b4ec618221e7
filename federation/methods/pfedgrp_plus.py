"""pFedGRP with levers of ours, each a setting: better replay that looks like real samples, and some that are off.

Differences from the paper: ``docs/methods/pfedgrp-plus.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from replayfleet.federation.methods import pfedgrp_records as grp
from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import ClientId, Parameters, Sampler
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.steps.memory import MixedData, drawable
from replayfleet.federation.methods.steps.replay import Replay, counts_for_distribution, draw_replay
from replayfleet.federation.methods.steps.task_model import judge_with


@dataclass(frozen=True, kw_only=True, slots=True)
class PFedGRPPlus(PFedGRP):
    """Settings and both halves of the method; those that aren't here are ``PFedGRP``'s.

    Attributes:
        sub_generator: mixtures of Gaussians, which cost no training, so that every round can be learned from.
        gate: off, for a round that is left out of its moments is lost.
        upload_growth: a class that was met five times as often as when it was uploaded last is uploaded again.
        smooth_share: every sample of a round is learned as replay looks too.
        detail_share: half of the replay gets fine detail.
        replay_credit: what a replayed sample counts for beside a real one where cross-entropy is balanced by class, 0
            to 1: less for replay that is worse. The loss adds the logarithm of what a class then counts for to its
            logit (Ren et al. 2020, "Balanced Meta-Softmax for Long-Tailed Visual Recognition", Eq. 3). 1 with equally
            many samples of all classes is the plain loss; 0 switches it off.
        choose: give a client the best, on fresh replay that nobody filtered, of Eq. 3's mixture, its own model and the
            average; of equally good ones the first.
    """

    name: ClassVar[str] = "pfedgrp-plus"

    sub_generator: str = "pca-mixture"
    gate: bool = False
    upload_growth: float = 5.0
    smooth_share: float = 1.0
    detail_share: float = 0.5
    replay_credit: float = 0.0
    choose: bool = False

    def __post_init__(self) -> None:
        PFedGRP.__post_init__(self)
        checks.within(0.0, 1.0, self, ["replay_credit"])
        if self.choose and self.generators == "single":
            raise ValueError("choose draws replay by class; expected generators='per-class'")

    def _prior(self, mixed: MixedData) -> torch.Tensor | None:
        if not self.replay_credit:
            return None
        num_classes = self.task.num_classes
        joined = torch.bincount(mixed.joined().labels.cpu(), minlength=num_classes)
        real = torch.bincount(mixed.real.labels.cpu(), minlength=num_classes)
        counts = real + self.replay_credit * (joined - real)
        # a class without samples has no logarithm; its logit is left as it is, so that the loss still pushes it down
        prior = torch.where(counts > 0, counts / counts.mean(), 1.0).log()
        return prior.to(mixed.real.images.device, torch.float32)

    def _chosen(
        self,
        client_id: ClientId,
        client: grp.ClientRecord,
        mixed: grp.Personalised,
        average: grp.Personalised,
        sampler: Sampler,
        rng: torch.Generator,
    ) -> grp.Personalised:
        if not self.choose:
            return mixed
        counts = counts_for_distribution(drawable(client.sub_generators, client.seen), self.replay_per_client)
        fresh = draw_replay(client.sub_generators, counts, sampler, None, split_generator(rng), spec=self.task)
        own = grp.Personalised(client.task_parameters, {client_id: 1.0})
        return max((mixed, own, average), key=lambda candidate: self._num_right(candidate.parameters, fresh))

    def _num_right(self, parameters: Parameters, replay: Replay) -> int:
        answers = judge_with(self.task, parameters)(replay.images).argmax(dim=1)
        return int((answers == replay.labels).sum())
