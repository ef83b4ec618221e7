from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from replayfleet.edge_client.flow import Picture, Samples
from replayfleet.edge_client.frames.answerer import Answerer
from replayfleet.edge_client.frames.views import WholePicture, to_pixels
from replayfleet.edge_client.learning.quality import accuracy
from replayfleet.edge_client.serving.loading import load_model
from replayfleet.edge_client.serving.messages import MAX_PACKET_BYTES
from replayfleet.edge_client.serving.model import Workers
from replayfleet.edge_client.serving.slot import ModelSlot
from replayfleet.edge_client.sync.download import Gate, candidate, is_same
from replayfleet.export.graphs.graph import task_graph
from replayfleet.export.parity import eager_run
from replayfleet.export.running.artefact import make_probe
from replayfleet.export.running.facts import task_facts
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.errors import TRANSIENT, ArtefactRejected, Reason
from replayfleet.federation.service.artefact_codec import encode_parameters
from replayfleet.federation.wire.protocol.messages import BlobEntry, Manifest, Serving
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec

TASK = TaskSpec(1, 28, ("a", "b", "c"))
GATE = Gate("fleet", "cam-7", max_bytes=100_000_000)


class Published:
    """What an aggregator would send, with one real exported graph for all rounds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = DiskBlobStore(folder)
        graph = task_graph(TASK)
        self.graph = BlobEntry("graph/task", self.store.put(graph), len(graph))
        self.logits: dict[int, Any] = {}

    def workers(self) -> Workers:
        return Workers(self.folder, num_threads=1, providers=("CPUExecutionProvider",))

    def manifest(self, version: int, *, damage: float = 0.0) -> Manifest:
        module = initialise(build_task_model(TASK), torch.Generator().manual_seed(version))
        probe = make_probe(eager_run(module), TASK.image_shape, seed=version)
        state = dict(module.state_dict())
        if damage:
            state["fc.weight" if "fc.weight" in state else next(iter(state))] += damage
        data = encode_parameters(state)
        parameters = BlobEntry("task", self.store.put(data), len(data))
        self.logits[version] = eager_run(module)
        return Manifest(
            "down", "fleet", "cam-7", version, version, (self.graph, parameters), b"\x80",
            Serving("graph/task", "task", probe),
        )  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("blobs"))


@pytest.fixture
def install(published: Published) -> Iterator[Callable[[ModelSlot, Manifest], Any]]:
    slots: list[ModelSlot] = []

    def install(slot: ModelSlot, manifest: Manifest) -> Any:
        slots.append(slot)
        return slot.install(candidate(manifest, TASK, published.workers()))

    yield install
    for slot in slots:
        slot.clear()


def reason(check: Callable[[], object]) -> Reason:
    with pytest.raises(ArtefactRejected) as caught:
        check()
    return caught.value.reason


def changed(manifest: Manifest, **changes: Any) -> Manifest:
    return msgspec.structs.replace(manifest, **changes)


def test_a_download_for_this_client_is_accepted_and_repeated_without_complaint(published: Published) -> None:
    first, second = published.manifest(1), published.manifest(2)
    GATE.check("cam-7", first, None)
    GATE.check("cam-7", second, first)
    GATE.check("cam-7", first, first)
    assert is_same(first, first)
    assert not is_same(second, first)
    assert not is_same(first, None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"direction": "up"}, Reason.MALFORMED),
        ({"fleet": "other"}, Reason.WRONG_FLEET),
        ({"client_id": "cam-8"}, Reason.UNKNOWN_CLIENT),
        ({"serving": None}, Reason.WRONG_LAYOUT),
        ({"blobs": (BlobEntry("graph/task", "a" * 64, 5),)}, Reason.WRONG_LAYOUT),
        ({"version": 2}, Reason.STALE_VERSION),
        ({"version": 3, "round": 9}, Reason.STALE_VERSION),
    ],
)
def test_a_download_that_is_not_ours_not_servable_or_old_is_refused(
    changes: dict[str, Any], expected: Reason, published: Published
) -> None:
    held = published.manifest(3)
    refused = changed(published.manifest(4), **changes)
    peer = refused.client_id if expected is Reason.UNKNOWN_CLIENT else "cam-7"
    assert reason(lambda: GATE.check(peer, refused, held)) is expected


def test_a_download_on_another_peers_link_or_larger_than_allowed_is_refused(published: Published) -> None:
    manifest = published.manifest(1)
    assert reason(lambda: GATE.check("*", manifest, None)) is Reason.UNKNOWN_CLIENT
    small = Gate("fleet", "cam-7", max_bytes=1000)
    assert reason(lambda: small.check("cam-7", manifest, None)) is Reason.TOO_LARGE
    huge = (BlobEntry("graph/task", "a" * 64, 65 << 20), BlobEntry("task", "b" * 64, 5))
    assert reason(lambda: GATE.check("cam-7", changed(manifest, blobs=huge), None)) is Reason.TOO_LARGE


def test_what_was_rolled_back_and_all_before_it_is_refused_and_what_is_newer_taken(published: Published) -> None:
    held, manifest = published.manifest(1), published.manifest(2)
    for version in (2, 3):
        asked = changed(manifest, version=version)
        assert reason(lambda asked=asked: GATE.check("cam-7", asked, held, 3)) is Reason.ROLLED_BACK  # type: ignore[misc]
    GATE.check("cam-7", changed(manifest, version=4), held, 3)


def test_a_download_may_be_as_large_as_is_allowed(published: Published) -> None:
    manifest = published.manifest(1)
    size = sum(blob.size_bytes for blob in manifest.blobs)
    Gate("fleet", "cam-7", size).check("cam-7", manifest, None)
    assert reason(lambda: Gate("fleet", "cam-7", size - 1).check("cam-7", manifest, None)) is Reason.TOO_LARGE


def test_shared_blobs_need_no_serving_and_have_no_version(published: Published) -> None:
    shared = Manifest("down", "fleet", "*", 0, 0, (published.graph,))
    GATE.check("*", shared, published.manifest(3))


def test_a_real_model_is_swapped_in_and_answers_as_the_trained_one(published: Published, install: Any) -> None:
    slot = ModelSlot()
    images = np.random.default_rng(5).uniform(-1, 1, (4, 1, 28, 28)).astype(np.float32)
    for version in (1, 2):
        served = install(slot, published.manifest(version))
        assert np.allclose(served.model(images), published.logits[version](images), atol=1e-4)
    picture = Picture("scene", 0, to_pixels(images)[0], 0.0)
    view = WholePicture(TASK)
    shown = Answerer(slot, view).answer(picture)
    assert shown.prediction.answers.class_ids.tolist() == [
        int(published.logits[2](view.inputs(picture).images).argmax())
    ]
    assert shown.prediction.model_version == 2


def test_a_model_with_other_parameters_than_its_probe_is_not_served(published: Published, install: Any) -> None:
    slot = ModelSlot()
    good = install(slot, published.manifest(1))
    assert reason(lambda: install(slot, published.manifest(2, damage=0.5))) is Reason.PROBE_MISMATCH
    assert reason(lambda: install(slot, published.manifest(2, damage=float("nan")))) is Reason.PROBE_MISMATCH
    assert slot.active is good


def test_a_graph_or_parameters_that_do_not_fit_are_not_served(published: Published, install: Any) -> None:
    manifest = published.manifest(1)
    junk = BlobEntry("graph/task", published.store.put(b"not an onnx graph"), 17)
    other = BlobEntry("task", published.store.put(encode_parameters({"weight": torch.zeros(2)})), 80)
    for blobs in ((junk, manifest.blobs[1]), (manifest.blobs[0], other)):
        assert reason(lambda b=blobs: install(ModelSlot(), changed(manifest, blobs=b))) is Reason.LOAD_FAILED  # type: ignore[misc]


def test_a_probe_that_asks_for_too_much_is_refused_before_it_costs_memory(published: Published, install: Any) -> None:
    manifest = published.manifest(1)
    greedy = msgspec.structs.replace(manifest.serving.probe, batch_size=1 << 40)
    serving = msgspec.structs.replace(manifest.serving, probe=greedy)
    assert reason(lambda: install(ModelSlot(), changed(manifest, serving=serving))) is Reason.PROBE_MISMATCH


@pytest.mark.parametrize(
    "task", [TaskSpec(1, 28, ("b", "a", "c")), TaskSpec(1, 28, ("a", "b", "c"), "imagenet")], ids=["classes", "stem"]
)
def test_a_graph_of_another_task_is_refused_though_every_shape_fits(task: TaskSpec, published: Published) -> None:
    slot = ModelSlot()
    with pytest.raises(ArtefactRejected, match=r"the graph's (classes|stem) is .*, the fleet agreed on ") as caught:
        slot.install(candidate(published.manifest(1), task, published.workers()))
    assert caught.value.reason is Reason.WRONG_LAYOUT
    assert slot.active is None
    slot.clear()


def test_names_of_a_thousand_classes_are_compared_and_no_reason_to_refuse_a_model(published: Published) -> None:
    names = tuple(f"{'a long name of a class ' * 3}{index}" for index in range(1000))
    agreed = TaskSpec(1, 28, names, architecture="lenet")
    other = replace(agreed, class_names=(*names[:-1], "something else"))
    graph = published.store.put(task_graph(agreed))
    state = initialise(build_task_model(agreed), torch.Generator().manual_seed(0)).state_dict()
    parameters = published.store.put(encode_parameters(state))
    with contextlib.closing(
        published.workers().model(graph, parameters, agreed.image_shape, task_facts(agreed))
    ) as model:
        assert model(np.zeros((1, 1, 28, 28), np.float32)).shape == (1, 1000)
    assert len(json.dumps(names)) > MAX_PACKET_BYTES
    with pytest.raises(ArtefactRejected, match=r"the graph's classes is .*, the fleet agreed on .*"):
        load_model(published.workers().model(graph, parameters, other.image_shape, task_facts(other)).job)


def test_a_session_that_falls_back_from_the_proved_provider_is_refused(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnnxModel, "active_providers", property(lambda _: ["SlowExecutionProvider"]))
    graph, parameters = (entry.digest for entry in published.manifest(1).blobs)
    job = published.workers().model(graph, parameters, TASK.image_shape).job
    with pytest.raises(ArtefactRejected, match="fell back from CPUExecutionProvider"):
        load_model(job)


def test_a_blob_that_the_disk_lost_is_asked_for_again(published: Published) -> None:
    graph, parameters = (entry.digest for entry in published.manifest(1).blobs)
    job = published.workers().model(graph, parameters, TASK.image_shape).job
    published.store.path(parameters).unlink()
    with pytest.raises(ArtefactRejected, match="is not on disk") as refused:
        load_model(job)
    assert refused.value.reason.value in TRANSIENT


def test_accuracy_counts_right_answers_over_all_batches() -> None:
    labels = np.arange(600, dtype=np.int64) % 3
    images = np.zeros((600, 1, 1, 1), np.float32)
    images[:, 0, 0, 0] = labels
    images[:150, 0, 0, 0] = (labels[:150] + 1) % 3
    samples = Samples(images, labels)
    assert accuracy(lambda x: np.eye(3, dtype=np.float32)[x[:, 0, 0, 0].astype(int)], samples) == 0.75
