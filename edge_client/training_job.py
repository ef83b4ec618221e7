"""What the client and its training process say to each other: JSON lines over the process's standard streams.

Large things go through files: round data as safetensors, everything else as blobs. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from edge_client.sources.base import Samples
from federation.protocol.messages import BlobEntry, FleetSpec, Manifest
from federation.protocol.tensors import decode_arrays, encode_arrays
from federation.service.atomic import write_atomic

SamplerName: TypeAlias = Literal["onnx", "eager"]

SAMPLERS: tuple[SamplerName, ...] = ("onnx", "eager")
"""How the device draws from its sub-generators: through their exported graph, or with PyTorch."""

GRAPH_PREFIX = "graph/"
"""Blobs of a download that are ONNX graphs; all others are the method's parameter sets."""

SUB_GENERATOR_GRAPH = "graph/sub-generator"

_ROUND_DATA = "round-data.safetensors"


class TrainJob(msgspec.Struct, frozen=True, tag="train"):
    """Train one round.

    Attributes:
        data_dir: the client's.
        client_id: whose randomness.
        spec: which method on which task.
        manifest: the download to start from; its round is the one to train.
        version: for the upload's manifest.
        sampler: one of ``SAMPLERS``.
        num_threads: of torch and of the sampler.
    """

    data_dir: str
    client_id: str
    spec: FleetSpec
    manifest: Manifest
    version: int
    sampler: SamplerName
    num_threads: int


class TrainerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The process has imported what it needs."""


class TrainDone(msgspec.Struct, frozen=True, tag="done"):
    """The round's commit is durable; ``note`` says what an operator should know (a lost state)."""

    round: int
    note: str = ""


class TrainFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The round can't be trained, and trying again won't help."""

    round: int
    error: str


FromTrainer: TypeAlias = TrainerReady | TrainDone | TrainFailed

_encoder = msgspec.json.Encoder()
_job_decoder = msgspec.json.Decoder(TrainJob)
_event_decoder: msgspec.json.Decoder[FromTrainer] = msgspec.json.Decoder(FromTrainer)


def to_line(message: TrainJob | FromTrainer) -> bytes:
    """Return one line, newline included."""
    return _encoder.encode(message) + b"\n"


def job_from_line(line: bytes) -> TrainJob:
    """Return what the client wrote."""
    return _job_decoder.decode(line)


def event_from_line(line: bytes) -> FromTrainer:
    """Return what the training process wrote."""
    return _event_decoder.decode(line)


def write_round_data(data_dir: Path, samples: Samples) -> None:
    """Put the round's samples where the training process finds them."""
    write_atomic(data_dir / _ROUND_DATA, encode_arrays({"images": samples.images, "labels": samples.labels}))


def read_round_data(data_dir: Path) -> Samples:
    """Return the samples again.

    Raises:
        MalformedMessage: The file is damaged.
        FileNotFoundError: There is none.
    """
    arrays = decode_arrays((data_dir / _ROUND_DATA).read_bytes())
    labels = arrays["labels"]
    kind = np.float32 if labels.ndim == 3 else np.int64
    return Samples(arrays["images"].astype(np.float32, copy=False), labels.astype(kind, copy=False))


def delete_round_data(data_dir: Path) -> None:
    """Forget the samples: their round is over."""
    (data_dir / _ROUND_DATA).unlink(missing_ok=True)


def parameter_sets_of(manifest: Manifest) -> tuple[BlobEntry, ...]:
    """Return the blobs that are the method's parameter sets."""
    return tuple(entry for entry in manifest.blobs if not entry.name.startswith(GRAPH_PREFIX))
