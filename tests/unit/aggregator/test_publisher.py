from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import torch
from support.tiny_fleet import TinyExporter
from support.tiny_method import TinyDownload

from replayfleet.aggregator.publisher import Publisher, export_graphs
from replayfleet.federation.errors import ArtefactRejected, Reason, ReplayfleetError
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.service.artefact_codec import decode_artefacts
from replayfleet.federation.wire.protocol.messages import ROUNDED_FROM, Probe, Serving
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore


class CountingExporter(TinyExporter):
    num_probes = 0

    def probe(self, parameters: dict[str, torch.Tensor]):
        self.num_probes += 1
        return super().probe(parameters)


@pytest.fixture
def blobs(tmp_path: Path) -> DiskBlobStore:
    return DiskBlobStore(tmp_path)


def publisher(blobs: DiskBlobStore, exporter: TinyExporter | None = None) -> Publisher:
    exporter = exporter or TinyExporter()
    return Publisher("f", blobs, exporter, export_graphs(blobs, exporter))


def parameters(value: float):
    return {"w": torch.full((4,), value)}


def test_a_manifest_lists_all_that_a_client_should_have(blobs: DiskBlobStore):
    download = TinyDownload(parameters(1), parameters(2), {0: {"g": torch.ones(3)}}, {"a": 1.0})
    draft = publisher(blobs).drafts({"a": download}, 4)["a"]
    assert [entry.name for entry in draft.blobs] == ["graph/task", "average", "personalised", "sub-generator/0"]
    assert (draft.round, draft.client_id, draft.direction) == (4, "a", "down")
    again = TinyDownload.unpack(decode_artefacts(draft.blobs[1:], draft.facts, blobs))
    assert again.personalised["w"].equal(download.personalised["w"])
    assert again.weights == {"a": 1.0}


def test_the_served_set_is_the_one_that_the_download_declares(blobs: DiskBlobStore):
    serving = publisher(blobs).drafts({"a": TinyDownload(parameters(1), parameters(2))}, 0)["a"].serving
    assert (serving.graph, serving.parameters, serving.probe.logits) == ("graph/task", "personalised", (1, 1, 1, 1))


def test_only_what_all_of_several_clients_get_is_shared(blobs: DiskBlobStore):
    average = parameters(9)
    downloads = {c: TinyDownload(parameters(i), average) for i, c in enumerate(("a", "b"))}
    for draft in publisher(blobs).drafts(downloads, 1).values():
        assert {entry.name: entry.shared for entry in draft.blobs} == {
            "graph/task": True,
            "average": True,
            "personalised": False,
        }
    alone = publisher(blobs).drafts({"a": downloads["a"]}, 1)["a"]
    assert not any(entry.shared for entry in alone.blobs)


def test_equal_models_are_probed_once(blobs: DiskBlobStore):
    exporter = CountingExporter()
    same = parameters(1)
    publisher(blobs, exporter).drafts({c: TinyDownload(same, same) for c in "abc"}, 0)
    assert exporter.num_probes == 1


def test_a_download_that_does_not_pack_what_it_serves_is_an_error(blobs: DiskBlobStore):
    class Wrong(TinyDownload):
        def pack(self) -> Artefacts:
            return Artefacts({"average": self.average}, {})

    with pytest.raises(ReplayfleetError, match=r"serves personalised, which isn't one of its sets \(average\)"):
        publisher(blobs).drafts({"a": Wrong(parameters(1), parameters(2))}, 0)


class PickyExporter(TinyExporter):
    """Its gate refuses models of huge numbers."""

    def probe(self, parameters: dict[str, torch.Tensor]):
        if parameters["w"].abs().max() > 100:
            raise ArtefactRejected(Reason.PROBE_MISMATCH, "too far off")
        return super().probe(parameters)


def test_a_client_whose_own_new_model_is_refused_keeps_the_one_that_it_serves(blobs: DiskBlobStore):
    publishing, average, kept = publisher(blobs, PickyExporter()), parameters(9), {}
    former = publishing.drafts({c: TinyDownload(parameters(i), average) for i, c in enumerate("ab")}, 1)
    downloads = {"a": TinyDownload(parameters(1e3), average), "b": TinyDownload(parameters(5), average)}
    drafts = publishing.drafts(downloads, 2, former, kept)
    assert list(kept) == ["a"]
    served = {client: draft.serving.probe.logits[0] for client, draft in drafts.items()}
    assert served == {"a": 0.0, "b": 5.0}
    assert [b.digest for b in drafts["a"].blobs if b.name == "personalised"] == [
        b.digest for b in former["a"].blobs if b.name == "personalised"
    ]


def test_a_client_that_keeps_a_model_which_it_serves_rounded_gets_it_exact(blobs: DiskBlobStore):
    publishing, average, kept = publisher(blobs, PickyExporter()), parameters(9), {}
    exact = publishing.drafts({"a": TinyDownload(parameters(3), average)}, 1)["a"]
    own = Serving("graph/task-int8", ROUNDED_FROM + "personalised", Probe(0, 1, (2.9,), 0.5))
    rounded = msgspec.structs.replace(exact, serving=own)
    draft = publishing.drafts({"a": TinyDownload(parameters(1e3), average)}, 2, {"a": rounded}, kept)["a"]
    assert (list(kept), draft.serving) == (["a"], exact.serving)
    assert exact.blobs == draft.blobs


def test_a_model_that_all_would_serve_is_refused_for_all(blobs: DiskBlobStore):
    publishing, bad = publisher(blobs, PickyExporter()), parameters(1e3)
    former = publishing.drafts({c: TinyDownload(parameters(1), parameters(9)) for c in "ab"}, 1)
    with pytest.raises(ArtefactRejected):
        publishing.drafts({c: TinyDownload(bad, bad) for c in "ab"}, 2, former)


def test_for_want_of_memory_nobody_keeps_a_former_model(blobs: DiskBlobStore):
    class Starved(TinyExporter):
        def probe(self, parameters: dict[str, torch.Tensor]) -> NoReturn:
            raise ArtefactRejected(Reason.LOAD_FAILED, "ONNX Runtime can't load the graph") from MemoryError()

    former = publisher(blobs).drafts({"a": TinyDownload(parameters(1), parameters(9))}, 1)
    with pytest.raises(ArtefactRejected):
        publisher(blobs, Starved()).drafts({"a": TinyDownload(parameters(2), parameters(9))}, 2, former)


def test_without_a_former_model_a_refusal_stays_one(blobs: DiskBlobStore):
    with pytest.raises(ArtefactRejected):
        publisher(blobs, PickyExporter()).drafts({"a": TinyDownload(parameters(1e3), parameters(9))}, 2)
