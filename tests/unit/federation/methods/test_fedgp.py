from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.methods import fedgp_records as fleet
from replayfleet.federation.methods.agem import AGEM
from replayfleet.federation.methods.der import DER
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.fedcurv import FedCurv
from replayfleet.federation.methods.fedgp import FedGP
from replayfleet.federation.methods.fedprox import FedProx
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Artefacts, Parameters, RoundData
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload
from replayfleet.federation.methods.steps.kept_samples import Reservoir
from replayfleet.federation.methods.steps.projection import gradient_at, gradient_layout, joined, project_conflicting
from replayfleet.federation.service.artefact_codec import decode_artefacts, encode_artefacts
from tests.support.shapes import SHAPES, shape_pictures
from tests.support.toy import run_rounds, toy_data
from tests.support.two_stages import (
    ONE_EPOCH,
    SAMPLER,
    SECOND,
    SECOND_STAGE,
    TOY,
    after_first_stage,
    agree,
    first_stage_loss,
    random_model,
    reservoir_of,
    rng,
    step_taken,
    what_fedavg_unlearns,
)

BASES: dict[str, Any] = {"plain": FedAvg, "der": DER, "agem": AGEM, "fedprox": FedProx}


class Blobs(dict[str, bytes]):
    """A blob store in memory."""

    def put(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        self[name] = data
        return name

    def read(self, digest: str) -> bytes:
        return self[digest]


def travelled(value: Any, layout: Any = None) -> Any:
    """The value after encoding and decoding, as between two machines or two processes."""
    blobs = Blobs()
    encoded = encode_artefacts(value.pack(), blobs)
    return type(value).unpack(decode_artefacts(encoded.blobs, encoded.facts, blobs, layout))


def constant_gradient(value: float) -> Parameters:
    return {name: torch.full(tensor.shape, value) for name, tensor in gradient_layout(TOY).items()}


def test_one_step_follows_the_gradient_projected_against_the_fleets() -> None:
    start, first = after_first_stage()
    data = toy_data({2: 4, 3: 4})
    reference = gradient_at(TOY, start, first.images, first.labels, "float32")
    download = fleet.Download(start, reference)
    _, upload = FedGP(task=TOY, **ONE_EPOCH).local_round(Reservoir(), data, download, rng(), sampler=SAMPLER)
    names = gradient_layout(TOY)
    new = joined(gradient_at(TOY, start, data.images, data.labels, "float32"), names)
    assert torch.dot(new, joined(reference, names)) < 0  # they do conflict
    taken = step_taken(start, upload.task_parameters)
    assert agree(taken, project_conflicting(new, joined(reference, names)))
    assert not agree(taken, new)


@pytest.mark.parametrize("base", BASES)
def test_without_conflict_it_has_the_bits_of_its_base(base: str) -> None:
    start, first = after_first_stage()
    data = toy_data({2: 8, 3: 8})
    simple = BASES[base](task=TOY, **ONE_EPOCH)
    without = base in ("plain", "fedprox")
    kept = Reservoir() if without else reservoir_of(first, judge=start if base == "der" else None)
    state = NoState() if without else kept
    _, expected = simple.local_round(state, data, TaskDownload(start), rng(), sampler=SAMPLER)
    method = FedGP(task=TOY, **ONE_EPOCH, base=base)
    for reference in ({}, constant_gradient(0.0)):
        _, upload = method.local_round(kept, data, fleet.Download(start, reference), rng(), sampler=SAMPLER)
        assert same_bits(upload.task_parameters, expected.task_parameters)


def test_the_first_two_rounds_have_fedavgs_bits_and_the_third_a_reference() -> None:
    rounds = [{"a": {0: 6}, "b": {1: 6}}, {"a": {1: 4}, "b": {0: 6}}]
    state, ours = run_rounds(FedGP(task=TOY, **ONE_EPOCH), rounds)
    _, theirs = run_rounds(FedAvg(task=TOY, **ONE_EPOCH), rounds)
    assert same_bits(ours["a"].task_parameters, theirs["a"].task_parameters)
    assert ours["a"].reference.keys() == gradient_layout(TOY).keys()
    first, _ = run_rounds(FedGP(task=TOY, **ONE_EPOCH), rounds[:1])
    assert not first.reference
    assert tuple(state.clients) == ("a", "b")


def test_a_client_sends_the_average_models_gradient_on_the_buffer_of_the_last_round() -> None:
    start, first = after_first_stage()
    method = FedGP(task=TOY, **ONE_EPOCH, reference_samples=24)
    reservoir = reservoir_of(first)
    _, upload = method.local_round(reservoir, toy_data(SECOND), fleet.Download(start), rng(), sampler=SAMPLER)
    expected = gradient_at(TOY, start, first.images, first.labels, "float32")
    for name, tensor in expected.items():
        assert torch.allclose(upload.gradient[name], tensor, atol=1e-5), name
    _, empty = method.local_round(Reservoir(), toy_data(SECOND), fleet.Download(start), rng(), sampler=SAMPLER)
    assert not empty.gradient
    few = FedGP(task=TOY, reference_samples=4).buffer_gradient(reservoir, start, rng())
    assert not same_bits(few, upload.gradient)


def test_a_gradient_that_isnt_finite_is_not_sent() -> None:
    start, first = after_first_stage()
    diverged = {**start, "head.weight": torch.full_like(start["head.weight"], float("nan"))}
    assert not FedGP(task=TOY).buffer_gradient(reservoir_of(first), diverged, rng())


def test_the_aggregator_averages_models_by_volume_and_gradients_evenly_whatever_the_order_of_arrival() -> None:
    method = FedGP(task=TOY)
    uploads = {
        "b": fleet.Upload({"w": torch.tensor([4.0])}, 30, {"w": torch.tensor([1.0])}),
        "a": fleet.Upload({"w": torch.tensor([0.0])}, 10, {"w": torch.tensor([0.1])}),
        "new": fleet.Upload({"w": torch.tensor([0.0])}, 20),
    }
    state, downloads = method.aggregate(fleet.AggregatorState(), uploads, rng(), sampler=SAMPLER)
    assert downloads["new"].task_parameters["w"].item() == 2.0
    assert downloads["new"].reference["w"].item() == pytest.approx(0.55)
    other, _ = method.aggregate(fleet.AggregatorState(), dict(sorted(uploads.items())), rng(), sampler=SAMPLER)
    assert same_bits(other.reference, state.reference)
    assert same_bits(other.average, state.average)


def test_the_last_reference_stays_where_no_upload_brings_a_gradient_and_absent_clients_get_both() -> None:
    method, initial = FedGP(task=TOY), fleet.Download({"w": torch.tensor([9.0])})
    before = fleet.AggregatorState(("a",), {"w": torch.tensor([1.0])}, {"w": torch.tensor([0.5])})
    uploads = {"b": fleet.Upload({"w": torch.tensor([4.0])}, 1)}
    state, downloads = method.aggregate(before, uploads, rng(), sampler=SAMPLER)
    assert sorted(downloads) == ["a", "b"]
    for download in (downloads["a"], method.download_for(state, "stranger", initial)):
        assert download.task_parameters["w"].item() == 4.0
        assert download.reference["w"].item() == 0.5
    assert method.download_for(fleet.AggregatorState(), "a", initial) is initial
    with pytest.raises(ValueError, match="without uploads"):
        method.aggregate(state, {}, rng(), sampler=SAMPLER)


def test_a_deployed_round_has_the_bits_of_a_simulated_one() -> None:
    start, first = after_first_stage()
    method = FedGP(task=TOY, **{**ONE_EPOCH, "batch_size": 8}, base="der")
    reservoir, data = reservoir_of(first, judge=start), toy_data({2: 8, 3: 8})
    download = fleet.Download(start, gradient_at(TOY, start, first.images, first.labels, "float32"))
    kept, upload = method.local_round(reservoir, data, download, rng(), sampler=SAMPLER)
    far_kept, far = method.local_round(travelled(reservoir), data, travelled(download), rng(), sampler=SAMPLER)
    assert same_bits(far_kept.samples, kept.samples)
    arrived = travelled(far, method.upload_layout)
    assert same_bits(arrived.task_parameters, upload.task_parameters)
    assert same_bits(arrived.gradient, upload.gradient)
    state, _ = method.aggregate(fleet.AggregatorState(), {"a": arrived}, rng(), sampler=SAMPLER)
    again = travelled(state)
    assert tuple(again.clients) == ("a",)
    assert same_bits(again.average, state.average)
    assert same_bits(again.reference, state.reference)


def test_hostile_uploads_are_refused() -> None:
    method, model = FedGP(task=TOY), random_model()
    honest = constant_gradient(1.0)

    def arrive(**sets: Parameters) -> fleet.Upload:
        blobs = Blobs()
        encoded = encode_artefacts(Artefacts({"task": model, **sets}, {"num_samples": 1}), blobs)
        return fleet.Upload.unpack(decode_artefacts(encoded.blobs, encoded.facts, blobs, method.upload_layout))

    method.check_upload(arrive(gradient=honest))
    method.check_upload(arrive())
    huge = torch.zeros(1, 4)
    hostile: list[tuple[dict[str, Parameters], Reason]] = [
        ({"gradient": {**honest, "head.weight": torch.zeros(9, 9)}}, Reason.WRONG_LAYOUT),
        ({"gradient": {**honest, "more": huge}}, Reason.WRONG_LAYOUT),
        ({"gradient": {}}, Reason.WRONG_LAYOUT),
        ({"gradient": {name: tensor.double() for name, tensor in honest.items()}}, Reason.WRONG_LAYOUT),
        ({"gradient": constant_gradient(float("nan"))}, Reason.NOT_FINITE),
        ({"reference": honest}, Reason.WRONG_LAYOUT),
        ({"buffer": {"images": huge}}, Reason.WRONG_LAYOUT),
    ]
    for sets, reason in hostile:
        with pytest.raises(ArtefactRejected) as caught:
            arrive(**sets)
        assert caught.value.reason is reason
    with pytest.raises(ValueError, match="num_samples"):
        method.check_upload(fleet.Upload({}, 0))
    with pytest.raises(ValueError, match="num_samples"):
        fleet.Upload.unpack(Artefacts({"task": model}, {"num_samples": "many"}))


def test_a_client_with_the_largest_gradient_there_is_does_not_break_the_others() -> None:
    method, largest = FedGP(task=TOY, **ONE_EPOCH), float(torch.finfo(torch.float32).max)
    uploads = {name: fleet.Upload(random_model(), 8, constant_gradient(largest)) for name in "ab"}
    _, downloads = method.aggregate(fleet.AggregatorState(), uploads, rng(), sampler=SAMPLER)
    _, upload = method.local_round(Reservoir(), toy_data({0: 8}), downloads["a"], rng(), sampler=SAMPLER)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in upload.task_parameters.values())


@pytest.mark.learning
@pytest.mark.parametrize("base", BASES)
def test_boxes_are_learnt_kept_and_projected_as_classes_are(base: str) -> None:
    spec = replace(SHAPES, width=2, stride=16)
    method = FedGP(task=spec, **{**ONE_EPOCH, "batch_size": 2}, base=base, buffer_size=3)
    kept, download = method.initial_states()[0], method.initial_download(rng())
    reference = gradient_at(spec, download.task_parameters, *shown(shape_pictures(3, seed=9)), "float32")
    for index, gradient in enumerate(({}, reference)):
        start = fleet.Download(download.task_parameters, gradient)
        kept, upload = method.local_round(kept, shape_pictures(4, seed=index), start, rng(index), sampler=SAMPLER)
    assert kept.num_seen == 8
    assert kept.samples["labels"].shape == (3, spec.max_boxes, 5)
    assert ("logits" in kept.samples) == (base == "der")
    if base == "der":
        assert kept.samples["logits"].shape == (3, *spec.output_shape)
    arrived = travelled(upload, method.upload_layout)
    assert same_bits(arrived.gradient, upload.gradient)
    assert same_bits(travelled(kept).samples, kept.samples)


def shown(data: RoundData) -> tuple[torch.Tensor, torch.Tensor]:
    return data.images, data.labels


def test_one_seed_gives_the_same_bits_and_inputs_stay_untouched() -> None:
    start, first = after_first_stage()
    reservoir = reservoir_of(first)
    download = fleet.Download(start, gradient_at(TOY, start, first.images, first.labels, "float32"))
    inputs = (start, reservoir.samples, download.reference)
    copies = [{name: tensor.clone() for name, tensor in each.items()} for each in inputs]
    method = FedGP(task=TOY, **ONE_EPOCH, base="agem")
    (one, sent), (two, again) = (
        method.local_round(reservoir, toy_data(SECOND), download, rng(3), sampler=SAMPLER) for _ in range(2)
    )
    assert same_bits(sent.task_parameters, again.task_parameters)
    assert same_bits(sent.gradient, again.gradient)
    assert same_bits(one.samples, two.samples)
    assert all(same_bits(*pair) for pair in zip(inputs, copies, strict=True))


@pytest.mark.learning
def test_it_unlearns_less_than_fedavg() -> None:
    start, first = after_first_stage()
    reference = gradient_at(TOY, start, first.images, first.labels, "float32")
    method, download = FedGP(task=TOY, **SECOND_STAGE), fleet.Download(start, reference)
    _, upload = method.local_round(Reservoir(), toy_data(SECOND), download, rng(), sampler=SAMPLER)
    assert first_stage_loss(upload.task_parameters) < 0.95 * what_fedavg_unlearns()


@pytest.mark.parametrize(
    ("setting", "value", "complaint"),
    [
        ("base", "derpp", "expected one of plain, der, agem"),
        ("alpha", -0.1, "alpha is"),
        ("reference_samples", 1, "at least 2"),
        ("buffer_size", 1, "at least 2"),
        ("local_epochs", 0, "local_epochs"),
    ],
)
def test_impossible_settings_are_refused(setting: str, value: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        FedGP(task=TOY, **{setting: value})  # type: ignore[arg-type]


def test_a_task_that_goes_on_offers_its_samples_to_the_buffer_once() -> None:
    method, start = FedGP(task=TOY, **ONE_EPOCH), random_model()
    states = [Reservoir()]
    for data in (toy_data({0: 6}), toy_data({0: 6}), toy_data({1: 5})):
        state, _ = method.local_round(states[-1], data, fleet.Download(start), rng(), sampler=SAMPLER)
        states.append(state)
    assert [state.num_seen for state in states] == [0, 6, 6, 11]


def test_over_fedcurv_a_client_is_held_to_what_the_others_need() -> None:
    rounds = [{"a": {0: 8, 1: 8}, "b": {2: 8}}, {"a": {2: 8}, "b": {3: 8}}]
    sharp = {"importance": 50.0, **ONE_EPOCH}
    state, ours = run_rounds(FedGP(task=TOY, base="fedcurv", **sharp), rounds)
    curv_state, theirs = run_rounds(FedCurv(task=TOY, **sharp), rounds)
    for name in ("a", "b"):  # two rounds bring no reference yet: FedCurv's bits
        assert same_bits(ours[name].task_parameters, theirs[name].task_parameters)
        assert same_bits(ours[name].weights, theirs[name].weights)
        assert same_bits(ours[name].targets, theirs[name].targets)
    assert same_bits(state.targets, curv_state.targets)
    upload = fleet.Upload(ours["a"].task_parameters, 4, {}, {"head.bias": torch.tensor([0.0, -1.0, 0.0, 0.0])})
    with pytest.raises(ValueError, match=r"fisher of head\.bias is negative"):
        FedGP(task=TOY, base="fedcurv").check_upload(upload)


def test_in_two_messages_the_reference_is_of_the_model_that_it_comes_with() -> None:
    task = replace(TOY, architecture="lenet")  # no BatchNorm: the order of six samples decides nothing
    method = FedGP(task=task, **ONE_EPOCH, reference_samples=64, two_messages=True)
    first, second = {"a": {0: 6}, "b": {1: 6}}, {"a": {1: 4}, "b": {0: 6}}
    _, once = run_rounds(method, [first])
    assert once["a"].asks
    assert not once["a"].reference
    _, twice = run_rounds(method, [first, second])
    assert not twice["a"].asks
    assert same_bits(twice["a"].task_parameters, once["a"].task_parameters)
    gradients = [
        gradient_at(task, once["a"].task_parameters, data.images, data.labels, "float32")
        for data in (toy_data({0: 6}), toy_data({1: 6}, seed=1))
    ]
    names = gradient_layout(task)
    mean = (joined(gradients[0], names) + joined(gradients[1], names)) / 2
    assert agree(joined(twice["a"].reference, names), mean)
    _, thrice = run_rounds(method, [first, second, second])
    assert thrice["a"].asks
    assert not same_bits(thrice["a"].task_parameters, twice["a"].task_parameters)
    with pytest.raises(ValueError, match="two_messages is for the other bases"):
        FedGP(task=TOY, base="fedcurv", two_messages=True)
