"""A-GEM: FedAvg whose clients keep a few real samples, and take no step that works against them.

Chaudhry et al. 2019, "Efficient Lifelong Learning with A-GEM", Eq. 11, in federated learning as FedGP's Algorithm 6 has
it (Dai et al. 2023, without its own projection). Real samples stay on the client.
Differences from the papers: ``docs/methods/agem.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from replayfleet.federation.methods.buffered_method import BufferedMethod, BufferUse, Drawn
from replayfleet.federation.methods.kit.records import RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps.kept_samples import IMAGES, LABELS, Reservoir
from replayfleet.federation.methods.steps.precision import computing_in
from replayfleet.federation.methods.steps.projection import joined, loss_gradient, project_gradient
from replayfleet.federation.methods.task_method import AveragingMethod
from replayfleet.models.specs import AnyTaskSpec


def against_the_buffer(task: AnyTaskSpec, precision: str) -> BufferUse:
    """Return A-GEM's use of the buffer: each step's gradient is projected against that of samples drawn from it."""

    def correct(module: nn.Module, drawn: Drawn) -> None:
        if met := drawn():
            with computing_in(precision, met[IMAGES].device):
                reference = loss_gradient(task, module, met[IMAGES], met[LABELS])  # g_ref
            project_gradient(module, joined(reference, reference))  # Eq. 11: g - <g, g_ref> / <g_ref, g_ref> g_ref

    return BufferUse(correct=correct)


@dataclass(frozen=True, kw_only=True, slots=True)
class AGEM(BufferedMethod, AveragingMethod):
    """The client's half; the aggregator's is ``AveragingMethod.aggregate``. Settings are ``BufferedMethod``'s."""

    name: ClassVar[str] = "agem"

    def local_work(
        self, state: Reservoir, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[Reservoir, TaskUpload]]:
        """Train on this round's data, each step's gradient projected against the buffer's."""
        use = against_the_buffer(self.task, self.precision)
        parameters, kept = yield from self.trained(use, download.task_parameters, data, state, rng)
        return kept, TaskUpload(parameters, len(data.labels))
