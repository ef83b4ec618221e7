"""From verified blobs to a model that answers, in whichever process: needs onnxruntime, neither torch nor onnx."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replayfleet.edge_client.serving.messages import Load, comparable
from replayfleet.edge_client.serving.slot import Model
from replayfleet.export.running.facts import own_facts
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.errors import ArtefactRejected, MalformedMessage, Reason
from replayfleet.federation.wire.protocol.tensors import arrays_in
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that has answered one blank image.

    Attributes:
        run: what answers.
        output_shape: of one image's outputs.
        runs_on: the execution provider that really runs.
        first_s: seconds of that first answer.
    """

    run: Model
    output_shape: tuple[int, ...]
    runs_on: str
    first_s: float


def load_model(load: Load) -> LoadedModel:
    """Load and warm up.

    Raises:
        ArtefactRejected: A blob is damaged or missing, graph and parameters don't fit, the graph is not of the fleet's
            task, or ONNX Runtime fell back from the provider that was asked for.
    """
    blobs = DiskBlobStore(Path(load.blobs), load.verified)
    try:
        # Mapped, as nothing changes a blob: read, decoded and joined it would be copied page by page three times.
        graph, parameters = blobs.read(load.graph), arrays_in(blobs.mapped(load.parameters))
    except KeyError as missing:
        # As one that is cut short: the disk's fault, not the model's, so the model is sent again.
        raise ArtefactRejected(Reason.WRONG_DIGEST, f"blob {missing} is not on disk") from missing
    except MalformedMessage as error:
        raise ArtefactRejected(Reason.MALFORMED, str(error)) from error
    model = OnnxModel(graph, parameters, num_threads=load.num_threads, providers=load.providers, lent=True)
    said = {key: comparable(fact) for key, fact in own_facts(model.metadata).items()}
    for key, expected in load.facts.items():
        if said.get(key, expected) != expected:  # same shapes, other classes: it would answer, and be wrong
            detail = f"the graph's {key} is {said[key]!r}, the fleet agreed on {expected!r}"
            raise ArtefactRejected(Reason.WRONG_LAYOUT, detail)
    first = load.providers[0]
    wanted, found = first if isinstance(first, str) else first[0], model.active_providers[0]
    if found != wanted:
        raise ArtefactRejected(Reason.LOAD_FAILED, f"session fell back from {wanted} to {found}")
    began = time.perf_counter()
    outputs = model.run(np.zeros((1, *load.image_shape), np.float32))
    return LoadedModel(model.run, outputs.shape[1:], found, time.perf_counter() - began)
