"""Finite uploads that stopped a fleet: each is left out, its client named, and the others get what they would have."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from replayfleet.aggregator.aggregation import LONGEST_REST, GpuRest, RoundResult
from replayfleet.aggregator.publisher import Publisher
from replayfleet.aggregator.store import StoredArtefacts
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.methods import METHODS, fedgp_records
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.records import Artefacts, Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.steps.screening import candidate_of, screen
from replayfleet.federation.service import artefact_codec
from replayfleet.federation.wire.protocol.messages import TASK_GRAPH, Probe
from tests.support.pills import DEPLOYED, PILLS, VARIED, Blobs, EagerExporter, changed, fleet, pills_of, scaled
from tests.support.virtual_device import NAME, virtual_device

QUICK = ("times 20", "2^40 samples")


@functools.cache
def round_without(name: str, client: str) -> RoundResult:
    return fleet(name).aggregate({c: upload for c, upload in fleet(name).uploads.items() if c != client})


def outcome_of(name: str, pill: Callable[[Artefacts], Artefacts], where: str) -> str:
    """Return "left out" if the round is as it were without ``where``, which is told why; else what is wrong."""
    honest, without = fleet(name), round_without(name, where)
    result = honest.aggregate({**honest.uploads, where: pill(honest.uploads[where])})
    if list(result.quarantined) != [where]:
        return f"left out were {list(result.quarantined)}"
    if result.state != without.state:
        return "the state is another"
    for client, draft in without.drafts.items():
        made = result.drafts[client]
        if (made.facts, {(b.name, b.digest) for b in made.blobs}) != (
            draft.facts,
            {(b.name, b.digest) for b in draft.blobs},
        ):
            return f"{client} gets another model"
    return "left out" if result.quarantined[where][:50] in result.drafts[where].notice else "it isn't told"


def assert_left_out(name: str, pills: dict[str, Callable[[Artefacts], Artefacts]]) -> None:
    found = {pill: outcome_of(name, make, "cam-2") for pill, make in pills_of(fleet(name), pills).items()}
    assert found == dict.fromkeys(found, "left out")


@pytest.mark.parametrize("name", DEPLOYED)
def test_a_pill_is_left_out_and_the_others_models_are_those_of_the_round_without_it(name: str):
    assert_left_out(name, PILLS if name in {"fedavg", "pfedgrp"} else {what: PILLS[what] for what in QUICK})


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DEPLOYED, *VARIED])
def test_so_is_every_pill_of_every_method_that_deploys_and_of_its_variants(name: str):
    assert_left_out(name, PILLS)


@pytest.mark.parametrize("name", DEPLOYED)
def test_honest_clients_are_left_in(name: str):
    result = fleet(name).aggregate(fleet(name).uploads)
    assert result.quarantined == {}
    assert result.kept == {}


def test_a_gradient_is_no_model_and_may_turn_and_grow():
    model, gradient = {"w": torch.ones(2, 2)}, {"w": torch.full((2, 2), 0.5)}
    upload = fedgp_records.Upload(model, 8, {"w": -9 * gradient["w"]})
    candidate = candidate_of(upload, fedgp_records.Download(model, gradient))
    assert screen({"cam-1": candidate}, lambda _: None, 1.5) == {}


@pytest.mark.parametrize("name", ["fedavg", "pfedgrp"])
def test_if_nobody_is_left_the_models_stay(name: str):
    honest = fleet(name)
    result = honest.aggregate({c: scaled(1e20)(upload) for c, upload in honest.uploads.items()})
    assert sorted(result.quarantined) == ["cam-1", "cam-2", "cam-3"]
    initial = honest.method.initial_download(seeded_generator(0, 0, "initial"))
    assert len(result.drafts) == 3
    for draft in result.drafts.values():
        assert msgspec.msgpack.decode(draft.facts) == msgspec.msgpack.decode(
            Publisher("f", Blobs(), EagerExporter(), ()).drafts({"cam-1": initial}, 1)["cam-1"].facts
        )


@pytest.mark.parametrize("name", DEPLOYED)
def test_a_round_is_aggregated_on_another_device_to_the_same_bits(name: str):
    honest = fleet(name)
    uploads = honest.uploads | {"cam-2": scaled(20)(honest.uploads["cam-2"])}
    here = honest.aggregate(uploads)
    with virtual_device():
        there = honest.aggregate(uploads, NAME)
    assert sorted(there.quarantined) == ["cam-2"]
    assert (there.state, there.drafts, there.weights) == (here.state, here.drafts, here.weights)


def test_a_gpu_that_fails_costs_no_round_and_nobody_quarantine(caplog: pytest.LogCaptureFixture):
    honest = fleet("fedavg")
    here, asked = honest.aggregate(honest.uploads), []

    class OnAWornGpu(FedAvg):
        def aggregate(self, state: Any, uploads: Any, rng: torch.Generator, *, sampler: Any) -> Any:
            asked.append(uploads["cam-1"].task_parameters["head.weight"].device.type)
            if asked[-1] != "cpu":
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().aggregate(state, uploads, rng, sampler=sampler)

    method = OnAWornGpu(**{each.name: getattr(honest.method, each.name) for each in dataclasses.fields(FedAvg)})
    with virtual_device():
        there = dataclasses.replace(honest, method=method).aggregate(honest.uploads, NAME)
    assert asked == [NAME, "cpu"]
    assert (there.state, there.drafts, there.quarantined) == (here.state, here.drafts, {})
    assert "GPU failed" in caplog.text


@pytest.mark.parametrize("name", [name for name in DEPLOYED if not getattr(METHODS[name], "rounds_alternate", False)])
def test_after_a_late_upload_the_next_round_needs_no_file_of_it(name: str):
    """A late model was kept as what it is mixed of, whose files go after the round: the next one ended the process."""
    honest = fleet(name)
    aggregation, late = honest.prepared(honest.uploads)
    first = aggregation.run(1, late, None)
    assert first.quarantined == {}
    files = aggregation._blobs
    in_time = {}
    for client, upload in honest.uploads.items():
        encoded = artefact_codec.encode_artefacts(changed(upload, lambda _, __, tensor: tensor * 1.01), files)
        in_time[client] = msgspec.structs.replace(late[client], round=2, blobs=encoded.blobs, facts=encoded.facts)
    needed = {blob.digest for one in (*in_time.values(), *first.drafts.values()) for blob in one.blobs}
    for gone in files.keys() - needed - first.state.digests():
        del files[gone]
    assert aggregation.run(2, in_time, first.state, first.drafts).quarantined == {}


def test_a_blob_that_vanished_from_our_own_disk_is_told_apart_from_what_a_client_did():
    honest = fleet("fedavg")
    broken = {**honest.uploads, "cam-3": scaled(1e4)(honest.uploads["cam-3"])}
    aggregation, manifests = honest.prepared(broken)
    del aggregation._blobs[manifests["cam-1"].blobs[0].digest]
    result = aggregation.run(0, manifests, None)
    assert (sorted(result.quarantined), result.lost) == (["cam-1", "cam-3"], {"cam-1"})
    assert "the aggregator's own copy is damaged" in result.quarantined["cam-1"]


def test_a_gpu_that_failed_is_asked_again_after_ever_longer_rests_until_it_works(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The aggregator went on on the CPU for good after another process had left too little memory once."""
    honest, asked, works = fleet("fedavg"), [], {15}
    aggregation, manifests = honest.prepared({"cam-1": honest.uploads["cam-1"]}, NAME)
    original = FedAvg.aggregate

    def worn(self: FedAvg, state: Any, uploads: Any, rng: torch.Generator, *, sampler: Any) -> Any:
        if uploads["cam-1"].task_parameters["head.weight"].device.type != "cpu":
            asked.append(index)
            if index not in works:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, state, uploads, rng, sampler=sampler)

    monkeypatch.setattr(FedAvg, "aggregate", worn)
    with virtual_device():
        for index in range(17):
            aggregation.run(index, manifests, None)
    assert asked == [0, 1, 3, 7, 15, 16]
    told = [vars(record)["fields"]["next"] for record in caplog.records if record.message == "GPU failed"]
    assert told == [f"aggregating on the CPU until round {index}" for index in (1, 3, 7, 15, 17)]
    rest = GpuRest()
    for index in range(99):
        rest.failed(index)
    assert rest.until == 98 + LONGEST_REST


def test_what_all_clients_share_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg's average stands in the state and in the download of every client: it was encoded for each of them."""
    encoded: list[object] = []
    real = artefact_codec.encode_parameters
    uploads = fleet("fedavg").uploads
    monkeypatch.setattr(artefact_codec, "encode_parameters", lambda each: encoded.append(each) or real(each))
    fleet("fedavg").aggregate(uploads)
    assert len(encoded) == 1


def test_who_was_excluded_has_no_share_in_what_others_get_and_finds_its_own_again() -> None:
    """What was cached of an excluded client was mixed into everybody's models on and on (``mix_absent``)."""
    honest = fleet("pfedgrp")
    method = dataclasses.replace(honest.method, mix_absent=True, warm_start=True)
    members = dataclasses.replace(honest, method=method)
    aggregation, manifests = members.prepared(members.uploads)
    first = aggregation.run(0, manifests, None)
    last = manifests.pop("cam-3")
    judging: list[StoredArtefacts] = []
    keeps = lambda drafts, _wishes, state: judging.append(state) or (drafts, {})  # noqa: E731
    aggregation._rounder = Mock(rounded=keeps)
    second = aggregation.run(1, manifests, first.state, left_out={"cam-3"})
    assert [sorted(result.drafts) for result in (first, second)] == [["cam-1", "cam-2", "cam-3"], ["cam-1", "cam-2"]]
    assert {name for shares in second.weights.values() for name in shares} == {"cam-1", "cam-2"}

    def donors(**left_out: Any) -> list[str]:
        draft = aggregation.download_for("new", 2, second.state, **left_out)
        return [blob.digest for blob in draft.blobs if blob.name.startswith("donor")]

    def entries(state: StoredArtefacts) -> dict[str, str]:
        return {blob.name: blob.digest for blob in state.blobs if blob.name.startswith("clients/cam-3/")}

    theirs = [entry.name.split("/")[1] for entry in judging[0].blobs if entry.name.startswith("clients/")]
    assert set(theirs) == {"cam-1", "cam-2"}
    assert donors()
    assert not donors(left_out={"cam-1", "cam-2", "cam-3"})
    assert entries(second.state) == entries(first.state) != {}
    third = aggregation.run(2, {"cam-3": last}, second.state, left_out={"cam-3"})
    assert "cam-3" in third.drafts, "its upload counts: it was excluded when the round had closed"


class Fussy(EagerExporter):
    """A gate that may refuse whatever comes, as of a model that broke among the pictures of another processor."""

    refuses = False

    def graphs(self) -> Mapping[str, bytes]:
        return {TASK_GRAPH: b"a graph"}

    def use(self, graphs: Mapping[str, bytes]) -> None:
        assert graphs

    def probe(self, parameters: Parameters) -> Probe:
        if self.refuses:
            raise ArtefactRejected(Reason.NOT_FINITE, "answers aren't finite")
        return super().probe(parameters)


def test_a_model_in_the_state_that_nobody_can_serve_ends_no_later_round() -> None:
    fussy, honest = Fussy(), fleet("pfedgrp").uploads
    aggregation, manifests = fleet("pfedgrp").prepared({**honest, "zz": scaled(1e4)(honest["cam-1"])}, exporter=fussy)
    absurd = {"zz": msgspec.structs.replace(manifests.pop("zz"), round=1)}
    former = {client: aggregation.download_for(client, 0, None) for client in [*manifests, "zz"]}
    first = aggregation.run(0, manifests, None, former)
    fussy.refuses = True
    second = aggregation.run(1, absurd, first.state, {**former, **first.drafts})
    assert list(second.quarantined) == ["zz"]
    assert "the former one stays" in second.kept["zz"]
    draft, served = second.drafts["zz"], {entry.name: entry.digest for entry in former["zz"].blobs}["personalised"]
    assert (draft.round, {entry.name: entry.digest for entry in draft.blobs}["personalised"]) == (2, served)
    assert second.state == first.state


def test_groups_are_tried_without_a_trace_on_the_disk() -> None:
    aggregation, manifests = fleet("pfedgrp").prepared(fleet("pfedgrp").uploads, exporter=Fussy())
    uploads, _ = aggregation._decoded(manifests)
    held = len(aggregation._blobs)  # type: ignore[arg-type]
    assert aggregation._rehearsed(0, uploads, aggregation._state(None), {}).keys() == manifests.keys()
    assert len(aggregation._blobs) == held  # type: ignore[arg-type]
