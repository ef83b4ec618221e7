"""What the pieces of a running client share; built once by the service, or by a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from replayfleet.devices.budget import TrainingAllowance
from replayfleet.devices.profiles import FP32
from replayfleet.edge_client.flow import Source
from replayfleet.edge_client.learning.local_training import LocalTraining
from replayfleet.edge_client.learning.training.job import SamplerName
from replayfleet.edge_client.serving.engine_desk import EngineDesk, no_engines
from replayfleet.edge_client.serving.model import Workers
from replayfleet.edge_client.serving.probation.probation import ProbationRules
from replayfleet.edge_client.serving.slot import ModelSlot
from replayfleet.edge_client.state_store import StateStore
from replayfleet.edge_client.sync.download import Gate
from replayfleet.edge_client.sync.trust import FleetTrust
from replayfleet.federation.service.disk import Disk
from replayfleet.federation.service.jobs import Jobs
from replayfleet.federation.wire.protocol.messages import Manifest
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.courier import FleetCourier
from replayfleet.models.specs import AnyTaskSpec


@dataclass(frozen=True, slots=True)
class Compute:
    """How this device computes.

    Attributes:
        providers: execution providers of the served model, the proved one first.
        inference_threads: of the served model.
        training_threads: of torch and of the sampler, in the training process.
        training_device: of torch, in the training process.
        sampler: how replay is drawn.
        probation: how new models are watched.
        allowance: what training may spend.
        precision: what the served model should compute in, one of ``devices.profiles.PRECISIONS``.
        trains: whether it takes part in training; a device without torch only serves.
        open_engines: (data dir, slot) -> who gets the served model an engine; None where there are none.
    """

    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    inference_threads: int = 1
    training_threads: int = 1
    training_device: str = "cpu"
    sampler: SamplerName = "onnx"
    probation: ProbationRules = field(default_factory=ProbationRules)
    allowance: TrainingAllowance = field(default_factory=TrainingAllowance)
    precision: str = FP32
    trains: bool = True
    open_engines: Callable[[Path, ModelSlot], EngineDesk | None] = no_engines


@dataclass(frozen=True)
class Parts:
    """The collaborators of one running client.

    Attributes:
        trust: whose word is taken, and which downloads.
        boot_id: names this process; what the aggregator offers must answer it.
        publish: (topic, payload, retain) on the control connection.
        workers: makes served models.
        clock: seconds, never backwards; read by jobs, for how long a swap took.
        frame_measures: metrics of the serving loop for reports.
        open_source: makes the source once the fleet's task is known; raises SettingsError if they don't fit.
        engines: who gets the served model an engine; None on devices that serve without.
        receiving: downloads by transfer id, from the offer to the verdict; their blobs must not be collected.
    """

    client_id: str
    data_dir: Path
    gate: Gate
    records: StateStore
    trust: FleetTrust
    boot_id: str
    blobs: DiskBlobStore
    disk: Disk
    courier: FleetCourier
    publish: Callable[[str, bytes, bool], None]
    slot: ModelSlot
    workers: Workers
    training: LocalTraining
    jobs: Jobs
    open_source: Callable[[AnyTaskSpec], Source]
    clock: Callable[[], float]
    frame_measures: Callable[[], Mapping[str, float]] = dict
    compute: Compute = field(default_factory=Compute)
    engines: EngineDesk | None = None
    receiving: dict[str, Manifest] = field(default_factory=dict)
