"""What MFCL, TARGET and LANDER have in common: records, averaging, seen classes, admission, purity."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.synthesis_records import CountedUpload, SynthesisDownload, SynthesisState
from replayfleet.federation.service.artefact_codec import decode_artefacts, encode_artefacts
from replayfleet.federation.simulator.measures.accounts import DigestOnly
from tests.support.replay_methods import (
    SAMPLER,
    SHORT_METHODS,
    aggregated,
    fedavg_local,
    random_task_model,
    uploads_of,
)
from tests.support.toy import toy_data

COUNTS = {"a": {0: 3, 1: 2}, "b": {1: 1, 3: 4}}
TRAINING = {"local_epochs": 1, "batch_size": 8, "weight_decay": 0.0}


class Blobs(DigestOnly):
    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        digest = super().put(data)
        self.held[digest] = data
        return digest

    def read(self, digest: str) -> bytes:
        return self.held[digest]


def travelled(value: Any) -> Any:
    """Return a record after its bytes went over the wire."""
    blobs = Blobs()
    encoded = encode_artefacts(value.pack(), blobs)
    return type(value).unpack(decode_artefacts(encoded.blobs, encoded.facts, blobs))


def assert_same(left: Any, right: Any) -> None:
    one, other = left.pack(), right.pack()
    assert one.facts == other.facts
    assert one.parameter_sets.keys() == other.parameter_sets.keys()
    assert all(packing.same_bits(p, other.parameter_sets[name]) for name, p in one.parameter_sets.items())


@pytest.fixture(scope="module", params=sorted(SHORT_METHODS))
def method(request: pytest.FixtureRequest) -> Any:
    return SHORT_METHODS[request.param]()


@pytest.fixture(scope="module")
def first(method: Any) -> tuple[Any, Any]:
    return aggregated(method, uploads_of(COUNTS))


def test_the_average_is_uniform_however_many_samples_a_client_had(first: tuple[Any, Any]) -> None:
    one, other = random_task_model(0), random_task_model(1)
    for name, tensor in first[0].average.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, (one[name] + other[name]) / 2)


def test_seen_classes_are_those_of_all_clients_and_rounds(method: Any, first: tuple[Any, Any]) -> None:
    state, downloads = first
    assert state.seen == downloads["a"].seen == (0, 1, 3)
    later, downloads = aggregated(method, uploads_of({"c": {2: 1}}), state=state)
    assert later.seen == (0, 1, 2, 3)
    assert sorted(downloads) == ["a", "b", "c"]
    assert later.clients == ("a", "b", "c")


def test_one_download_is_for_everybody_and_carries_what_the_method_sends(method: Any, first: tuple[Any, Any]) -> None:
    state, downloads = first
    assert downloads["a"] is downloads["b"]
    assert bool(downloads["a"].generator) == method.sends_generator
    assert bool(downloads["a"].synthetic) != method.sends_generator
    assert state.generator
    initial = method.initial_download(seeded_generator(0, 0, "initial"))
    assert_same(method.download_for(state, "nobody-knows-me", initial), downloads["a"])
    assert method.download_for(method.initial_states()[1], "a", initial) is initial


def test_arrival_order_is_irrelevant_and_one_seed_gives_the_same_bits(method: Any, first: tuple[Any, Any]) -> None:
    uploads = uploads_of(COUNTS)
    again, _ = aggregated(method, dict(reversed(list(uploads.items()))))
    assert_same(again, first[0])
    other, _ = aggregated(method, uploads, seed=1)
    assert not packing.same_bits(other.generator, first[0].generator)


def test_aggregation_leaves_state_and_uploads_untouched(method: Any, first: tuple[Any, Any]) -> None:
    state, uploads = first[0], uploads_of(COUNTS)
    before = {name: {k: t.clone() for k, t in p.items()} for name, p in state.pack().parameter_sets.items()}
    later, _ = aggregated(method, uploads, state=state)
    assert all(packing.same_bits(p, before[name]) for name, p in state.pack().parameter_sets.items())
    assert packing.same_bits(uploads["a"].task_parameters, random_task_model(0))
    assert not packing.same_bits(later.generator, state.generator)


def test_a_local_round_is_pure_and_repeats_to_the_bit(method: Any, first: tuple[Any, Any]) -> None:
    state, download, data = method.initial_states()[0], first[1]["a"], toy_data({1: 4, 2: 4})
    before = travelled(download)
    uploads = [
        method.local_round(state, data, download, seeded_generator(seed, 0, "a"), sampler=SAMPLER)[1]
        for seed in (0, 0, 1)
    ]
    assert_same(download, before)
    assert torch.equal(data.images, toy_data({1: 4, 2: 4}).images)
    assert uploads[0].counts == {1: 4, 2: 4}
    assert packing.same_bits(uploads[0].task_parameters, uploads[1].task_parameters)
    assert not packing.same_bits(uploads[0].task_parameters, uploads[2].task_parameters)
    method.check_upload(uploads[0])


@pytest.mark.parametrize("name", sorted(SHORT_METHODS))
def test_a_first_round_is_fedavgs_to_the_bit(name: str) -> None:
    method = SHORT_METHODS[name](**({"anchor_weight": 0.0} if name == "lander" else {}))
    start, data = random_task_model(3), toy_data({0: 6, 1: 6})
    _, upload = method.local_round(
        method.initial_states()[0], data, SynthesisDownload(start), seeded_generator(0, 0, "a"), sampler=SAMPLER
    )
    assert packing.same_bits(upload.task_parameters, fedavg_local(start, data, TRAINING))


def test_state_upload_and_download_survive_the_wire(first: tuple[Any, Any]) -> None:
    state, downloads = first
    for value in (state, downloads["a"], SynthesisState(), CountedUpload(random_task_model(), {0: 1, 3: 2})):
        assert_same(travelled(value), value)


def test_an_upload_is_one_task_model_and_nothing_else(method: Any) -> None:
    layout = method.upload_layout("task")
    expected = random_task_model()
    assert {n: (t.shape, t.dtype) for n, t in layout.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
    assert all(tensor.is_meta for tensor in layout.values())
    for name in ("generator", "synthetic", "sub-generator/0", "", "task/"):
        assert method.upload_layout(name) is None


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "'counts' is NoneType"),
        ({"counts": [1, 2]}, "'counts' is list"),
        ({"counts": {"-1": 3}}, "class id '-1'"),
        ({"counts": {"0": True}}, "is True, expected a whole number"),
        ({"counts": {"0": 1.5}}, "is 1.5, expected a whole number"),
        ({"counts": {"0": float("nan")}}, "is nan, expected a whole number"),
        ({"counts": {"0": -1}}, "is -1, expected a whole number"),
        ({"counts": {"0": 2**60}}, "expected a whole number from 0"),
        ({"counts": {}}, "no samples were counted"),
        ({"counts": {"4": 1}}, "class 4 was counted, but the task has classes 0 to 3"),
        ({"counts": {"0": 5, "1": 0}}, "class 1 was counted with 0 samples"),
    ],
)
def test_an_upload_with_impossible_counts_is_refused(method: Any, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method.check_upload(CountedUpload.unpack(Artefacts({"task": {}}, facts)))


def test_an_upload_without_a_task_model_is_refused() -> None:
    with pytest.raises(ValueError, match="parameter set 'task' is missing"):
        CountedUpload.unpack(Artefacts({}, {"counts": {"0": 1}}))


@pytest.mark.parametrize("seen", [None, "01", [1, 0], [0, 0], [-1], [True], [0.0]])
def test_a_download_with_impossible_classes_is_refused(seen: Any) -> None:
    with pytest.raises(ValueError, match="seen"):
        SynthesisDownload.unpack(Artefacts({"task": {}}, {"seen": seen}))


@pytest.mark.parametrize(
    "synthetic",
    [{"other": torch.zeros(1)}, {"images": torch.zeros(1, 1, 2, 2)}, {"images": torch.zeros(2, dtype=torch.uint8)}],
)
def test_a_download_whose_images_are_no_images_is_refused(synthetic: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="'synthetic' must be one tensor 'images'"):
        SynthesisDownload.unpack(Artefacts({"task": {}, "synthetic": synthetic}, {"seen": []}))


def test_a_round_without_uploads_is_refused(method: Any) -> None:
    with pytest.raises(ValueError, match="without uploads"):
        aggregated(method, {})


def test_absurd_uploads_leave_generator_and_images_of_the_round_before(method: Any, first: tuple[Any, Any]) -> None:
    state = first[0]
    absurd = {n: t * 1e30 if t.is_floating_point() else t for n, t in random_task_model().items()}
    later, _ = aggregated(method, {"a": CountedUpload(absurd, {0: 1})}, state=state)
    assert packing.same_bits(later.generator, state.generator)
    assert packing.same_bits(later.synthetic, state.synthetic)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mfcl", {"generator_steps": -1}),
        ("mfcl", {"pixel_std": 0.0}),
        ("mfcl", {"content_temperature": float("nan")}),
        ("mfcl", {"logits": "some"}),
        ("target", {"synthesis_batch_size": 1}),
        ("target", {"adversarial_where": "everywhere"}),
        ("target", {"temperature": 0.0}),
        ("lander", {"anchor_radius": -0.1}),
        ("lander", {"samples_per_layer": 0}),
        ("lander", {"batch_size": 1}),
    ],
)
def test_impossible_settings_are_refused_by_name(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        SHORT_METHODS[name](**change)
