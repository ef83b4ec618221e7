"""What methods share whose aggregator trains a generator without data: records and the parts without mathematics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from replayfleet.federation.methods.kit.records import ClientId, Parameters
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.synthesis_records import CountedUpload, SynthesisDownload, SynthesisState
from replayfleet.federation.methods.task_method import TaskMethod, require_uploads
from replayfleet.models.build import build_module, build_task_model, initialise
from replayfleet.models.specs import TaskSpec

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthesisMethod(TaskMethod):
    """Plumbing; a method adds its name, its own settings, ``local_work`` and ``aggregate``. Clients have no state."""

    Upload: ClassVar[type[Any]] = CountedUpload
    Download: ClassVar[type[Any]] = SynthesisDownload
    AggregatorState: ClassVar[type[Any]] = SynthesisState
    sends_generator: ClassVar[bool] = False
    """Whether clients get the generator; otherwise they get the images that it drew."""

    task: TaskSpec

    def initial_download(self, rng: torch.Generator) -> SynthesisDownload:
        """Return one random task model; there is nothing to replay yet."""
        return SynthesisDownload(initialise(build_task_model(self.task), rng).state_dict())

    def download_for(self, state: SynthesisState, client_id: ClientId, initial: SynthesisDownload) -> SynthesisDownload:
        return self.download_of(state) if state.average else initial

    def check_upload(self, upload: CountedUpload) -> None:
        upload.check(self.task.num_classes)

    def download_of(self, state: SynthesisState) -> SynthesisDownload:
        """Return what everybody gets after the round that made ``state``."""
        generator = state.generator if self.sends_generator else {}
        return SynthesisDownload(state.average, generator, state.synthetic, state.seen)

    def same_for_all(self, state: SynthesisState) -> tuple[SynthesisState, dict[ClientId, SynthesisDownload]]:
        """Return the state, and one download for all clients that it knows."""
        return state, dict.fromkeys(state.clients, self.download_of(state))


def uniform_average(uploads: Mapping[ClientId, CountedUpload]) -> dict[str, torch.Tensor]:
    """Return the plain mean of all uploaded task models, BatchNorm statistics included, summed in the order of ids.

    Raises:
        ValueError: There are no uploads.
    """
    require_uploads(uploads)
    ordered: list[Parameters] = [uploads[client_id].task_parameters for client_id in sorted(uploads)]
    return weighted_average(ordered, torch.full((len(ordered),), 1 / len(ordered), dtype=torch.float64))


def seen_classes(state: SynthesisState, uploads: Mapping[ClientId, CountedUpload]) -> tuple[int, ...]:
    """Return all classes that any client met so far, in rising order."""
    return tuple(sorted({*state.seen, *(class_id for upload in uploads.values() for class_id in upload.counts)}))


def known_clients(state: SynthesisState, uploads: Mapping[ClientId, CountedUpload]) -> tuple[ClientId, ...]:
    """Return the ids of all clients that ever uploaded, sorted."""
    return tuple(sorted({*state.clients, *uploads}))


def built_generator(construct: Callable[[], M], parameters: Parameters, rng: torch.Generator) -> M:
    """Return what ``construct`` makes with a copy of these parameters, or with first ones drawn if there are none."""
    module = build_module(construct)
    if not parameters:
        return initialise(module, rng)
    module.load_state_dict(dict(parameters))
    return module
