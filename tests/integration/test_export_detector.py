"""A detector's graph answers as the eager one does, and a device without torch finds the same boxes with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from replayfleet.aggregator.publisher import Publisher, export_graphs
from replayfleet.aggregator.serving import OnnxExporter
from replayfleet.export.batches import BATCHES
from replayfleet.export.graphs.graph import task_graph
from replayfleet.export.graphs.join import join
from replayfleet.export.parity import DETECTOR_TOLERANCE, check_parity, eager_run
from replayfleet.export.running.artefact import PROBED_ENTRIES, Array, check_probe, make_probe
from replayfleet.export.running.detections import detections
from replayfleet.export.running.facts import own_facts
from replayfleet.export.running.inspection import inspect_graph
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.errors import ArtefactRejected
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.steps.detection import found_boxes
from replayfleet.federation.wire.protocol.codec import encode_manifest
from replayfleet.federation.wire.protocol.messages import TASK_GRAPH
from replayfleet.federation.wire.protocol.tensors import decode_arrays
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import DetectionRules, DetectionSpec

NARROW = DetectionSpec(
    3, 64, 96, ("vehicle", "bike", "traffic_light"), ((0.05, 0.1), (0.2, 0.2), (0.5, 0.6)), width=4, stride=16
)
STANDARD = DetectionSpec(3, 64, 64, ("vehicle",), ((0.1, 0.2),))
PYRAMID = replace(NARROW, stride=8, architecture="pyramid")
SPECS = [NARROW, replace(NARROW, stride=8, width=2), STANDARD, PYRAMID]


def as_if_trained(spec: DetectionSpec, seed: int = 0) -> nn.Module:
    """Return a detector whose BatchNorm has statistics that eval mode must use, and whose confidences differ."""
    rng = torch.Generator().manual_seed(seed)
    module = initialise(build_task_model(spec), rng)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_(0.0, 0.05, generator=rng)
                layer.running_var.uniform_(0.1, 0.4, generator=rng)
                layer.bias.normal_(0.0, 0.3, generator=rng)
        module.head.weight.mul_(2)
        module.head.bias.zero_()
    return module.eval()


def arrays_of(module: nn.Module) -> dict[str, Array]:
    return {key: value.numpy().copy() for key, value in module.state_dict().items()}


def pictures(spec: DetectionSpec, count: int) -> Array:
    return np.random.default_rng(count).uniform(-1, 1, (count, *spec.image_shape)).astype(np.float32)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.architecture}-{spec.width}-wide-stride-{spec.stride}")
def test_the_exported_detector_agrees_with_the_eager_one(spec: DetectionSpec):
    module, batches = as_if_trained(spec), BATCHES if spec is NARROW else (1, 2, 8)
    assert BATCHES == (1, 2, 64)
    assert DETECTOR_TOLERANCE == 1e-3
    eager, graph, parameters = eager_run(module), task_graph(spec), arrays_of(module)
    assert eager(pictures(spec, 4)).std() > 0.1, "answers too small to tell models apart"
    split, joined = OnnxModel(graph, parameters, num_threads=1), OnnxModel(join(graph, parameters), {}, num_threads=1)
    for name, exported in {"onnx": split, "onnx, one file": joined}.items():
        worst = check_parity(name, exported.run, eager, spec.image_shape, batches=batches, tolerance=DETECTOR_TOLERANCE)
        assert worst < DETECTOR_TOLERANCE / 2


@pytest.mark.parametrize("count", [1, 2, 16])
def test_a_device_finds_the_boxes_that_torch_finds(count: int):
    module, rules = as_if_trained(NARROW), DetectionRules(score_threshold=0.3)
    served = OnnxModel(task_graph(NARROW), arrays_of(module), num_threads=1)
    x = pictures(NARROW, count)
    with torch.no_grad():
        expected = found_boxes(NARROW, module(torch.from_numpy(x)), rules)
    found = detections(NARROW, served.run(x), rules)
    assert len(found) == count
    assert all(len(one) for one in found)
    for ours, theirs in zip(expected, found, strict=True):
        assert ours.class_ids.tolist() == theirs.class_ids.tolist()
        np.testing.assert_allclose(ours.scores.numpy(), theirs.scores, atol=1e-4)
        np.testing.assert_allclose(ours.corners.numpy(), theirs.corners, atol=1e-4)


def test_a_detectors_graph_leaves_open_exactly_the_state_dict_and_says_how_to_read_it():
    summary = inspect_graph(task_graph(NARROW))
    names = {name for name in arrays_of(as_if_trained(NARROW)) if not name.endswith(".num_batches_tracked")}
    assert set(summary.parameters) == names
    facts = own_facts(summary.metadata)
    assert facts["kind"] == "detector"
    assert json.loads(facts["anchors"]) == [list(anchor) for anchor in NARROW.anchors]
    assert json.loads(facts["output"]) == list(NARROW.output_shape)
    assert facts["stride"] == "16"
    assert len(task_graph(NARROW)) < 32_000


def test_a_golden_vector_of_a_detector_is_short_and_tells_detectors_apart():
    module, other = as_if_trained(NARROW), as_if_trained(NARROW, seed=1)
    probe = make_probe(eager_run(module), NARROW.image_shape, seed=11, batch_size=2)
    assert len(probe.logits) == 2 * PROBED_ENTRIES
    served = OnnxModel(task_graph(NARROW), arrays_of(module), num_threads=1)
    assert check_probe(served.run, probe, NARROW.image_shape, NARROW.output_shape) < 1e-4
    wrong = OnnxModel(task_graph(NARROW), arrays_of(other), num_threads=1)
    with pytest.raises(ArtefactRejected, match="probe-mismatch"):
        check_probe(wrong.run, probe, NARROW.image_shape, NARROW.output_shape)
    with pytest.raises(ArtefactRejected, match="expected"):
        check_probe(served.run, probe, NARROW.image_shape, (24, 8, 12))


def test_a_device_can_serve_the_detector_that_an_aggregator_publishes(tmp_path: Path):
    method = METHODS["fedavg"](task=NARROW)
    exporter, blobs = OnnxExporter(method, NARROW), DiskBlobStore(tmp_path)
    download = method.initial_download(seeded_generator(1, 0, "initial"))
    manifest = Publisher("f", blobs, exporter, export_graphs(blobs, exporter)).drafts({"cam": download}, 0)["cam"]
    assert len(encode_manifest(manifest)) < 16 << 10
    entries = {entry.name: entry for entry in manifest.blobs}
    assert TASK_GRAPH in entries
    serving = manifest.serving
    parameters = decode_arrays(blobs.read(entries[serving.parameters].digest))
    model = OnnxModel(blobs.read(entries[serving.graph].digest), parameters, num_threads=1)
    assert check_probe(model.run, serving.probe, NARROW.image_shape, NARROW.output_shape) < 1e-4
