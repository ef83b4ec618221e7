"""What methods share whose upload is one task model: its SGD, its records, and the parts that hold no mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from replayfleet.federation.methods.kit import checks, packing, travel
from replayfleet.federation.methods.kit.records import ClientId, Judge, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload, TaskModels, TaskUpload
from replayfleet.federation.methods.lockstep import Descend, InStep, TrainTaskModel
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.steps.grouped_task_model import TaskModelJob
from replayfleet.federation.methods.steps.robust import RobustSettings, robust_average
from replayfleet.federation.methods.steps.task_model import BatchLoss, Optimisation, judge_with
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import AnyTaskSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskMethod(InStep):
    """Settings and plumbing; a method adds its name, its own settings, ``local_work`` and ``aggregate``.

    Defaults are those of pFedGRP's experiments (its appendix B.2), which all its baselines share.

    Attributes:
        task: what is learnt. A method that needs a class for every picture declares it anew, as a ``TaskSpec``.
        local_epochs: epochs per round.
        batch_size: samples per step.
        learning_rate: of SGD.
        learning_rate_schedule: how it falls within a round, ``constant``, ``cosine`` or ``step``.
        momentum: of SGD.
        weight_decay: of SGD.
        precision: of the training (pFedGRP: and of Eq. 3's descent), ``float32`` or ``bfloat16``.
        models_travel_as: ``float32``: as they are; ``float16``; or ``int8``: as a difference from a model that the
            other end holds (``docs/bytes.md``).
    """

    stores_data: ClassVar[bool] = False
    deployable: ClassVar[bool] = True
    Upload: ClassVar[type[Any]] = TaskUpload
    Download: ClassVar[type[Any]] = TaskDownload
    ClientState: ClassVar[type[Any]] = NoState
    AggregatorState: ClassVar[type[Any]] = TaskModels

    task: AnyTaskSpec
    local_epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 0.01
    learning_rate_schedule: str = "constant"
    momentum: float = 0.9
    weight_decay: float = 0.01
    precision: str = "float32"
    models_travel_as: str = "float32"

    def __post_init__(self) -> None:
        checks.task_kind(self)
        checks.task_model_settings(self)
        checks.one_of(travel.MODELS, self, "models_travel_as")
        if isinstance(self, RobustSettings):
            self.check_robust()

    def initial_states(self) -> tuple[Any, Any]:
        """Return (a client's state, the aggregator's state) before round 0: both empty."""
        return self.ClientState(), self.AggregatorState()

    def initial_download(self, rng: torch.Generator) -> Any:
        """Return one random task model."""
        return TaskDownload(initialise(build_task_model(self.task), rng).state_dict())

    def download_for(self, state: Any, client_id: ClientId, initial: Any) -> Any:
        """Return the client's own task model, else the one that is for everybody, else ``initial``."""
        parameters = state.clients.get(client_id) or state.common
        return TaskDownload(parameters) if parameters else initial

    def training(self, data: RoundData, start: Parameters, rng: torch.Generator) -> TrainTaskModel:
        """Return what a client trains by the task's loss alone: ``start``, on these samples."""
        return TrainTaskModel(self.task, TaskModelJob(start, data.images, data.labels, rng), Optimisation.of(self))

    def descending(self, start: Parameters, num_samples: int, rng: torch.Generator, batch_loss: BatchLoss) -> Descend:
        """Return what a client trains by a loss of the method's own."""
        return Descend(self.task, start, num_samples, Optimisation.of(self), rng, batch_loss)

    def upload_layout(self, name: str) -> Parameters | None:
        """Return the layout of a task model for every set that an upload declares."""
        return self.task_layout() if packing.place_of(self.Upload, name) else None

    def task_layout(self) -> Parameters:
        """Return the task model's names, shapes and dtypes."""
        return packing.layout(build_task_model(self.task, device="meta"))

    def check_upload(self, upload: Any) -> None:
        """Raise ValueError if the upload says that it was trained on nothing."""
        if upload.num_samples < 1:
            raise ValueError("num_samples is 0, expected at least 1")

    def predictor(self, download: Any) -> Judge:
        """Return what a device with this download answers."""
        return judge_with(self.task, download.task_parameters)


@dataclass(frozen=True, kw_only=True)
class AveragingMethod(TaskMethod, RobustSettings):
    """A ``TaskMethod`` whose aggregator does as FedAvg's: everybody gets the average by data volume, or a robust one.

    Settings beside those of ``TaskMethod``: ``RobustSettings``. It declares no slots of its own, so that a method can
    have it as a second base.
    """

    __slots__ = ()

    def aggregate(
        self, state: TaskModels, uploads: Mapping[ClientId, TaskUpload], rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[TaskModels, dict[ClientId, TaskDownload]]:
        """Average the uploads by the number of samples behind each, or robustly."""
        if self.robust == "none":
            return one_model_for_all(state, uploads, average_by_volume(uploads))
        require_uploads(uploads)
        models = [uploads[client_id].task_parameters for client_id in sorted(uploads)]
        return one_model_for_all(state, uploads, robust_average(models, self.robust, self.hostile_share).parameters)


class Counted(Protocol):
    """An upload that says how many real samples of this round are behind it."""

    @property
    def num_samples(self) -> int:
        """How many."""


U = TypeVar("U", bound=Counted)


def in_order_with_shares(uploads: Mapping[ClientId, U]) -> tuple[list[U], torch.Tensor]:
    """Return the N uploads in the order of their clients' ids, and each one's share of all samples, (N,) float64.

    Raises:
        ValueError: There are no uploads.
    """
    require_uploads(uploads)
    ordered = [uploads[client_id] for client_id in sorted(uploads)]
    sizes = torch.tensor([upload.num_samples for upload in ordered], dtype=torch.float64)
    return ordered, sizes / sizes.sum()


def average_by_volume(uploads: Mapping[ClientId, TaskUpload]) -> dict[str, torch.Tensor]:
    """Return FedAvg's average: each task model by its number of samples in this round.

    McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Algorithm 1, last
    line of the server. Clients are summed in the order of their ids.

    Raises:
        ValueError: There are no uploads.
    """
    ordered, shares = in_order_with_shares(uploads)
    return weighted_average([upload.task_parameters for upload in ordered], shares)


def require_uploads(uploads: Mapping[ClientId, Any]) -> None:
    """Raise ValueError if nobody took part in the round."""
    if not uploads:
        raise ValueError("a round without uploads can't be aggregated")


def one_model_for_all(
    state: TaskModels, uploads: Mapping[ClientId, TaskUpload], parameters: Parameters
) -> tuple[TaskModels, dict[ClientId, TaskDownload]]:
    """Return the state and the downloads when every client known so far gets the same task model."""
    known = sorted(state.clients.keys() | uploads.keys())
    return TaskModels(dict.fromkeys(known, parameters), parameters), {c: TaskDownload(parameters) for c in known}
