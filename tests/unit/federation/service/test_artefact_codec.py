from __future__ import annotations

import gc
import hashlib
import weakref
from pathlib import Path

import pytest
import torch

from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.methods.kit.records import Artefacts, Parameters
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.service import artefact_codec
from replayfleet.federation.service.artefact_codec import (
    EncodedOnce,
    StoredParameters,
    decode_artefacts,
    decode_parameters,
    encode_artefacts,
    encode_parameters,
    largest_encoding_bytes,
)
from replayfleet.federation.wire.protocol.messages import BlobEntry
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore

SET = {"b.weight": torch.randn(3, 2), "a.count": torch.tensor(5), "a.flag": torch.tensor([True, False])}


class Blobs(dict):
    def put(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        self[name] = data
        return name

    def read(self, digest: str) -> bytes:
        return self[digest]


def equal(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and left[k].shape == right[k].shape and left[k].equal(right[k]) for k in left
    )


def test_artefacts_come_back_to_the_bit_with_dtypes_and_scalars():
    blobs = Blobs()
    encoded = encode_artefacts(Artefacts({"task": SET, "sub-generator/3": {"g": torch.ones(1)}}, {"n": 3}), blobs)
    again = decode_artefacts(encoded.blobs, encoded.facts, blobs)
    assert equal(again.parameter_sets["task"], SET)
    assert again.facts == {"n": 3}
    assert [entry.name for entry in encoded.blobs] == ["sub-generator/3", "task"]
    assert all(entry.size_bytes == len(blobs[entry.digest]) for entry in encoded.blobs)


def test_equal_sets_are_one_blob_whatever_their_order_or_memory_layout():
    turned = {name: SET[name].t().contiguous().t() if SET[name].ndim == 2 else SET[name] for name in reversed(SET)}
    assert encode_parameters(turned) == encode_parameters(SET)


def test_a_layout_gives_the_order_and_rejects_everything_else():
    layout = {name: tensor.to("meta") for name, tensor in SET.items()}
    data = encode_parameters(SET)
    assert list(decode_parameters("task", data, layout)) == list(SET)
    assert len(data) <= largest_encoding_bytes(layout)
    wrong = {**layout, "b.weight": torch.empty(2, 3, device="meta")}
    fewer = {name: tensor for name, tensor in layout.items() if name != "b.weight"}
    for other, says in ((wrong, r"is \(3, 2\)"), (fewer, "is unexpected")):
        with pytest.raises(ArtefactRejected, match=f"task: tensor 'b.weight' {says}") as caught:
            decode_parameters("task", data, other)
        assert caught.value.reason is Reason.WRONG_LAYOUT


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_rejected_with_their_place(value: float):
    data = encode_parameters({"w": torch.tensor([0.0, value])})
    with pytest.raises(ArtefactRejected, match="task: tensor 'w'") as caught:
        decode_parameters("task", data)
    assert caught.value.reason is Reason.NOT_FINITE


def test_bytes_that_are_no_tensors_are_malformed():
    for data in (b"", b"\x00" * 40, encode_parameters(SET)[:-1]):
        with pytest.raises(ArtefactRejected) as caught:
            decode_parameters("task", data)
        assert caught.value.reason is Reason.MALFORMED


def test_facts_that_are_no_map_are_malformed():
    with pytest.raises(ArtefactRejected) as caught:
        decode_artefacts((), b"\x93\x01\x02\x03", Blobs())
    assert caught.value.reason is Reason.MALFORMED


@pytest.fixture(params=[0, 1 << 20])
def small_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Sets are mapped, or held."""
    monkeypatch.setattr(artefact_codec, "_SMALL_BYTES", request.param)
    return int(request.param)


@pytest.fixture
def _mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefact_codec, "_SMALL_BYTES", 0)


def stored(folder: Path, parameters: Parameters = SET, **how: object) -> tuple[StoredParameters, DiskBlobStore]:
    store, data = DiskBlobStore(folder), encode_parameters(parameters)
    return StoredParameters(BlobEntry("task", store.put(data), len(data)), store, **how), store  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_bytes")
def test_a_stored_set_is_the_set_in_the_layouts_order(tmp_path: Path) -> None:
    found, _ = stored(tmp_path, layout={name: tensor.to("meta") for name, tensor in SET.items()})
    assert list(found) == list(SET)
    assert equal(dict(found), SET)


@pytest.mark.parametrize("by", [-1, 1])
def test_a_blob_of_another_size_than_its_entry_says_is_refused_for_others_would_be_told_that_size(
    tmp_path: Path, by: int
) -> None:
    found, store = stored(tmp_path)
    lied = BlobEntry("task", found.entry.digest, found.entry.size_bytes + by)
    with pytest.raises(ArtefactRejected, match=f"declared were {lied.size_bytes}") as caught:
        StoredParameters(lied, store, {name: tensor.to("meta") for name, tensor in SET.items()})
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.usefixtures("small_bytes")
def test_a_stored_set_goes_to_another_process_as_its_tensors(tmp_path: Path) -> None:
    found, _ = stored(tmp_path)
    kind, (tensors,) = found.__reduce__()
    assert kind is dict
    assert equal(tensors, SET)


@pytest.mark.usefixtures("_mapped")
def test_a_stored_set_is_in_memory_only_while_one_of_its_tensors_is(tmp_path: Path) -> None:
    found, store = stored(tmp_path)
    held: list[weakref.ref[object]] = []
    mapped = store.mapped

    def watched(digest: str) -> object:
        data = mapped(digest)
        held.append(weakref.ref(data))
        return data

    store.mapped = watched  # type: ignore[assignment]
    first = found["b.weight"]
    second = found["a.count"]
    assert len(held) == 1  # both lie in one mapping
    del first
    assert held[0]() is not None
    del second
    gc.collect()
    assert held[0]() is None
    assert found["a.count"].item() == 5


def test_what_lies_in_a_store_is_neither_encoded_nor_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, store = stored(tmp_path)
    monkeypatch.setattr(artefact_codec, "encode_parameters", lambda parameters: pytest.fail("encoded again"))
    encoded = encode_artefacts(Artefacts({"mine": found}), store)
    assert encoded.blobs == (BlobEntry("mine", found.entry.digest, found.entry.size_bytes),)


def test_one_set_under_many_names_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []
    real = artefact_codec.encode_parameters
    monkeypatch.setattr(artefact_codec, "encode_parameters", lambda each: encoded.append(each) or real(each))
    once = EncodedOnce(Blobs())
    entries = {once.entry(f"clients/{number}/task", SET).digest for number in range(10)}
    assert (len(entries), len(encoded)) == (1, 1)


@pytest.mark.usefixtures("_mapped")
def test_a_file_that_changed_since_it_was_verified_is_verified_again(tmp_path: Path) -> None:
    found, store = stored(tmp_path)
    path = store.path(found.entry.digest)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtefactRejected, match="it will be fetched again"):
        found["b.weight"]


@pytest.mark.usefixtures("small_bytes")
def test_writing_into_a_stored_set_changes_no_file(tmp_path: Path) -> None:
    found, store = stored(tmp_path)
    found["b.weight"].zero_()
    assert store.read(found.entry.digest) == encode_parameters(SET)


def test_a_stored_set_with_numbers_that_are_none_is_refused_by_name(tmp_path: Path) -> None:
    store, data = DiskBlobStore(tmp_path), encode_parameters({**SET, "b.weight": torch.tensor([1.0, float("nan")])})
    entry = BlobEntry("task", store.put(data), len(data))
    with pytest.raises(ArtefactRejected, match=r"task: tensor 'b\.weight' has values"):
        StoredParameters(entry, store, must_be_finite=True)


@pytest.mark.parametrize("others", [{}, {"c.half": torch.randn(5).to(torch.float16)}, {"z.bias": torch.randn(9001)}])
def test_stored_sets_have_the_average_of_the_same_sets_in_memory_to_the_bit(
    tmp_path: Path, others: Parameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [{**SET, "b.weight": torch.randn(3, 2), "a.large": torch.randn(70, 90), **others} for _ in range(70)]
    weights = torch.rand(70, dtype=torch.float64)
    weights /= weights.sum()
    on_disk = [stored(tmp_path, parameters=one)[0] for one in sets]
    expected = weighted_average(sets, weights)
    mixed = weighted_average([*on_disk[:1], *sets[1:]], weights)
    one_piece = "c.half" not in others
    assert bool(on_disk[0].in_order) == one_piece
    if one_piece:  # only the first and the heaviest are asked for single tensors
        for number in {*range(1, 70)} - {int(weights.argmax())}:
            monkeypatch.setattr(on_disk[number], "_names", ())
    found = weighted_average(on_disk, weights)
    assert list(found) == list(on_disk[0])
    assert equal(found, expected)
    assert equal(mixed, expected)
