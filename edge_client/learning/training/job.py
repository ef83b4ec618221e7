"""What the client and its training process say to each other: JSON lines over the process's standard streams.

Large things go through files: round data in memory, everything else as blobs. Nothing here imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from replayfleet.devices.budget import TrainingAllowance
from replayfleet.edge_client.flow import Samples
from replayfleet.edge_client.state_store import Choice
from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec, Manifest
from replayfleet.federation.wire.protocol.tensors import decode_arrays, encode_arrays
from replayfleet.federation.wire.transport.blob_store import FileLook

SamplerName: TypeAlias = Literal["onnx", "eager"]
"""How the device draws from its sub-generators: through their exported graph, or with PyTorch."""

GRAPH_PREFIX = "graph/"
"""Blobs of a download that are ONNX graphs; all others are the method's parameter sets."""

SUB_GENERATOR_GRAPH = "graph/sub-generator"

JSON_LOGS = "--json-logs"
IDLE = "--idle"
"""Argument of the process: take only what nobody else wants, as on a device, which has nothing else to do."""

BLOBS = "blobs"
"""The blob store's folder in a client's data dir."""


class TrainJob(msgspec.Struct, frozen=True, tag="train"):
    """Train one round.

    Attributes:
        data_dir: the client's.
        client_id: whose randomness.
        spec: which method on which task.
        manifest: the download to start from; its round is the one to train.
        version: for the upload's manifest.
        sampler: how replay is drawn.
        num_threads: of torch and of the sampler.
        round_data: ``RoundFile.path``.
        allowance: what the board may spend, its ``memory_bytes`` filled in.
        left_s: seconds that all of it may take, counted from when the process reads it; None for no deadline.
        torch_device: where it is trained, ``cpu``, ``cuda``, ... or ``auto``.
        choice: what of the download is served; None where nothing was chosen.
        verified: of ``DiskBlobStore``.
    """

    data_dir: str
    client_id: str
    spec: FleetSpec
    manifest: Manifest
    version: int
    sampler: SamplerName
    num_threads: int
    round_data: str
    allowance: TrainingAllowance = msgspec.field(default_factory=TrainingAllowance)
    left_s: float | None = None
    torch_device: str = "cpu"
    choice: Choice | None = None
    verified: dict[str, FileLook] = {}


class ChooseJob(msgspec.Struct, frozen=True, tag="choose"):
    """Choose what to serve, now that a download is there.

    Attributes:
        data_dir: the client's.
        client_id: whose randomness.
        spec: which method on which task.
        manifest: the download.
        served: the float32 parameters that are served now; None if they aren't to be chosen.
        sampler: how replay is drawn.
        num_threads: of torch and of the sampler.
        held_out: ``RoundFile.path`` of the samples to judge by; empty if there are none.
        verified: of ``DiskBlobStore``.
    """

    data_dir: str
    client_id: str
    spec: FleetSpec
    manifest: Manifest
    served: BlobEntry | None
    sampler: SamplerName
    num_threads: int
    held_out: str = ""
    verified: dict[str, FileLook] = {}


class TrainerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The process has imported what it needs."""


class TrainCourse(msgspec.Struct, frozen=True, tag="course"):
    """What the budget lets a round train; at its end (``done``), what was trained.

    Attributes:
        round: which.
        epochs: of the task model.
        full_epochs: that the method asks for.
        sub_generators: that are trained in this round.
        full_sub_generators: that the method asks for, as far as it is known yet.
        lost: of classes that were never learned, for which there is no time; their samples are gone after the round.
        in_time: False if not even one step fits before the deadline.
        done: the round is trained.
    """

    round: int
    epochs: float = 0.0
    full_epochs: int = 0
    sub_generators: int = 0
    full_sub_generators: int = 0
    lost: int = 0
    in_time: bool = True
    done: bool = False

    @property
    def is_short(self) -> bool:
        return self.epochs < self.full_epochs or self.sub_generators < self.full_sub_generators

    def text(self) -> str:
        """Return it in words, as ``epochs 5 of 8, 2 of 3 sub-generators now``."""
        said = f"epochs {round(self.epochs, 1):g} of {self.full_epochs}"
        if self.full_sub_generators:
            when = "" if self.done else " now"
            said += f", {self.sub_generators} of {self.full_sub_generators} sub-generators{when}"
        if self.lost:
            said += f", {self.lost} new not learned"
        return said if self.in_time else f"{said}, late"


class TrainDone(msgspec.Struct, frozen=True, tag="done"):
    """The round's commit is durable; ``note`` says what an operator should know (a lost state).

    ``verified``, of ``DiskBlobStore``, are the upload's blobs.
    """

    round: int
    note: str = ""
    verified: dict[str, FileLook] = {}


class TrainFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The round can't be trained, and trying again won't help; but for ``disk_errno``, of a disk that took nothing."""

    round: int
    error: str
    disk_errno: int | None = None


class Chose(msgspec.Struct, frozen=True, tag="chose"):
    """What was chosen for the round's download; None: there was nothing to judge by."""

    round: int
    version: int
    choice: Choice | None


AnyJob: TypeAlias = TrainJob | ChooseJob
FromTrainer: TypeAlias = TrainerReady | TrainCourse | TrainDone | TrainFailed | Chose


class RoundFile:
    """A round's samples on their way to the training process, in memory alone.

    An anonymous memory file (``memfd_create``, Linux), which processes of the same user can read: what a camera saw
    lies on no disk, and is gone with the client, however that ends.

    Args:
        samples: the round's.

    Raises:
        OSError: There is no memory for them.
    """

    def __init__(self, samples: Samples) -> None:
        self._fd = os.memfd_create("round-data")
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            with open(self._fd, "wb", closefd=False) as file:
                file.write(encode_arrays({"images": samples.images, "labels": samples.labels}))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Forget the samples: their round is over. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def read_round_data(path: str) -> Samples:
    """Return the samples of a ``RoundFile``.

    Raises:
        MalformedMessage: They are damaged.
        FileNotFoundError: They are gone, and so is their round.
    """
    arrays = decode_arrays(Path(path).read_bytes())
    labels = arrays["labels"]
    kind = np.float32 if labels.ndim == 3 else np.int64
    return Samples(arrays["images"].astype(np.float32, copy=False), labels.astype(kind, copy=False))


def parameter_sets_of(manifest: Manifest) -> tuple[BlobEntry, ...]:
    """Return the blobs that are the method's parameter sets."""
    return tuple(entry for entry in manifest.blobs if not entry.name.startswith(GRAPH_PREFIX))
