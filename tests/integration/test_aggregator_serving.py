from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replayfleet.aggregator import serving
from replayfleet.aggregator.publisher import SUB_GENERATOR_GRAPH, Publisher, export_graphs
from replayfleet.aggregator.serving import OnnxExporter
from replayfleet.export.running.artefact import check_probe
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.errors import ArtefactRejected
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.service.fleet.presets import TASKS
from replayfleet.federation.wire.protocol.messages import TASK_GRAPH
from replayfleet.federation.wire.protocol.tensors import decode_arrays
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore

TASK = TASKS["fashion-mnist"]


@pytest.fixture(scope="module")
def method() -> Any:
    return METHODS["pfedgrp"](task=TASK)


@pytest.fixture(scope="module")
def exporter(method: Any) -> OnnxExporter:
    return OnnxExporter(method, TASK)


def test_a_device_can_serve_what_is_published_and_prove_it(tmp_path: Path, method: Any, exporter: OnnxExporter):
    blobs = DiskBlobStore(tmp_path)
    publisher = Publisher("f", blobs, exporter, export_graphs(blobs, exporter))
    download = method.initial_download(seeded_generator(1, 0, "initial"))
    manifest = publisher.drafts({"cam": download}, 0)["cam"]
    entries = {entry.name: entry for entry in manifest.blobs}
    assert {TASK_GRAPH, SUB_GENERATOR_GRAPH, "average", "personalised"} == entries.keys()
    serving = manifest.serving
    parameters = decode_arrays(blobs.read(entries[serving.parameters].digest))
    model = OnnxModel(blobs.read(entries[serving.graph].digest), parameters, num_threads=1)
    assert check_probe(model.run, serving.probe, TASK.image_shape, TASK.output_shape) < 1e-4


def test_parameters_that_are_not_finite_are_never_published(method: Any, exporter: OnnxExporter):
    parameters = dict(method.initial_download(seeded_generator(1, 0, "initial")).task_parameters)
    name = next(iter(parameters))
    parameters[name] = torch.full_like(parameters[name], float("nan"))
    with pytest.raises(ArtefactRejected, match="not-finite"):
        exporter.probe(parameters)


def test_a_graph_is_compared_with_the_trained_model_once(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, opened = OnnxExporter(method, TASK).graphs(), []
    real = serving.OnnxModel
    monkeypatch.setattr(serving, "OnnxModel", lambda *args, **how: opened.append(args) or real(*args, **how))
    models = [method.initial_download(seeded_generator(seed, 0, "initial")).task_parameters for seed in (1, 2, 3)]
    fresh = OnnxExporter(method, TASK)
    fresh.use(graphs)
    probes = [fresh.probe(parameters) for parameters in models]
    assert len(opened) == 1
    for parameters, probe in zip(models, probes, strict=True):  # and what wasn't compared holds all the same
        arrays = {name: tensor.numpy() for name, tensor in parameters.items()}
        check_probe(real(graphs[TASK_GRAPH], arrays, num_threads=1).run, probe, TASK.image_shape, TASK.output_shape)


def test_a_method_without_sub_generators_gets_no_graph_for_them():
    assert set(OnnxExporter(METHODS["fedavg"](task=TASK), TASK).graphs()) == {TASK_GRAPH}
