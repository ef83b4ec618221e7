from __future__ import annotations

import hashlib

import pytest
import torch

from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.service.artefact_codec import (
    decode_artefacts,
    decode_parameters,
    encode_artefacts,
    encode_parameters,
    largest_encoding_bytes,
)

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
    with pytest.raises(ArtefactRejected, match=r"task: tensor 'b.weight' is \(3, 2\)") as caught:
        decode_parameters("task", data, wrong)
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
