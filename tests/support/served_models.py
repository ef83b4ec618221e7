"""Real ONNX models without torch: linear classifiers of coloured pictures, as downloads that a slot can install."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from replayfleet.edge_client.serving.model import WorkerRules, Workers
from replayfleet.edge_client.serving.slot import Candidate
from replayfleet.edge_client.sync.download import candidate
from replayfleet.export.running.artefact import make_probe
from replayfleet.export.running.inspection import PARAMETERS
from replayfleet.federation.wire.protocol.messages import BlobEntry, Manifest, Serving
from replayfleet.federation.wire.protocol.tensors import encode_arrays
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.models.specs import TaskSpec

TASK = TaskSpec(3, 32, ("red", "green", "blue"), generator_width=1)
COLOURS = 255 * np.eye(3, dtype=np.uint8)
SCENE: NDArray[np.uint8] = np.stack([np.tile(COLOURS[index % 3], (32, 32, 1)) for index in range(30)])
"""Picture i shows nothing but colour i % 3."""

_SIZE = 3 * 32 * 32


def colour_graph() -> bytes:
    """Return ``Gemm(Flatten(x), weight, bias)`` with both tensors left open."""
    tensors = []
    for name, shape in (("weight", (_SIZE, 3)), ("bias", (3,))):
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=PARAMETERS)
        tensors.append(tensor)
    graph = helper.make_graph(
        [helper.make_node("Flatten", ["x"], ["flat"]), helper.make_node("Gemm", ["flat", "weight", "bias"], ["y"])],
        "colours",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("B", 3, 32, 32))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("B", 3))],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    data: bytes = model.SerializeToString()
    return data


class Colours:
    """What an aggregator would send; version v names a picture's colour, v classes further on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = DiskBlobStore(folder)
        graph = colour_graph()
        self.graph = BlobEntry("graph/task", self.store.put(graph), len(graph))

    def workers(self, *command: str, patience_s: float | None = None, load_timeout_s: float = 120.0) -> Workers:
        rules = WorkerRules(load_timeout_s=load_timeout_s)
        if command:
            rules = WorkerRules(command, load_timeout_s, patience_s or rules.patience_s)
        return Workers(self.folder, num_threads=1, providers=("CPUExecutionProvider",), rules=rules)

    def parameters(self, version: int, *, shift: int = 0, bias: float = 0.0) -> dict[str, NDArray[np.float32]]:
        weight = np.zeros((3, 32 * 32, 3), np.float32)
        for colour in range(3):
            weight[colour, :, (colour + shift) % 3] = 4 / 1024
        weight[0, 0, 0] += version * 1e-6  # so that no two versions are the same blob
        return {"weight": weight.reshape(_SIZE, 3), "bias": np.array([0, bias, 0], np.float32)}

    def manifest(self, version: int, *, shift: int = 0, bias: float = 0.0, lies: bool = False) -> Manifest:
        """Args: shift the classes; bias of class 1; whether the golden vector is another model's."""
        arrays = self.parameters(version, shift=shift, bias=bias)
        said = self.parameters(version, shift=1) if lies else arrays

        def run(images: NDArray[np.float32]) -> NDArray[np.float32]:
            return images.reshape(len(images), -1) @ said["weight"] + said["bias"]

        data = encode_arrays(arrays)
        parameters = BlobEntry("task", self.store.put(data), len(data))
        serving = Serving("graph/task", "task", make_probe(run, TASK.image_shape, seed=version))
        return Manifest("down", "fleet", "cam", version, version, (self.graph, parameters), b"\x80", serving)

    def candidate(self, version: int, workers: Workers | None = None, **how: float) -> Candidate:
        return candidate(self.manifest(version, **how), TASK, workers or self.workers())  # type: ignore[arg-type]
