"""Finite uploads that stopped a fleet: each is left out, its client named, and the others get what they would have."""

from __future__ import annotations

import dataclasses
import functools
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
import torch
from support.toy import TOY, toy_data

from replayfleet.aggregator.aggregation import Aggregation, RoundResult, Terms
from replayfleet.aggregator.publisher import Publisher
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.methods import METHODS, fedgp_records
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.records import Artefacts, Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.methods.steps.screening import candidate_of, screen
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.federation.service import artefact_codec
from replayfleet.federation.service.artefact_codec import encode_artefacts
from replayfleet.federation.service.fleet.spec import make_spec, method_of
from replayfleet.federation.service.fleet.variants import VARIANTS, resolved
from replayfleet.federation.wire.protocol.messages import Manifest, Probe
from replayfleet.federation.wire.protocol.tensors import digest
from tests.support.virtual_device import NAME, virtual_device

DEPLOYED = sorted(name for name, method in METHODS.items() if method.deployable and name != "centralized")
VARIED = sorted(name for name, (method, _) in VARIANTS.items() if method in DEPLOYED)


class Blobs(dict):
    def put(self, data: bytes) -> str:
        self[digest(data)] = data
        return digest(data)

    def read(self, name: str) -> bytes:
        return self[name]

    def mapped(self, name: str) -> mmap.mmap:
        found = mmap.mmap(-1, len(self[name]))
        found[:] = self[name]
        return found


class EagerExporter:
    """The gate without ONNX: answers that aren't finite, or are huge, are refused, as parity refuses them."""

    def graphs(self) -> Mapping[str, bytes]:
        return {}

    def probe(self, parameters: Parameters) -> Probe:
        answers = judge_with(TOY, parameters)(torch.zeros(1, *TOY.image_shape))
        if not bool(answers.isfinite().all()):
            raise ArtefactRejected(Reason.NOT_FINITE, "answers aren't finite")
        return Probe(0, 1, tuple(answers.flatten().tolist()), 1e-3)


@dataclasses.dataclass(frozen=True)
class Fleet:
    """A fleet after its clients' local rounds, once for all tests of a method."""

    spec: Any
    method: Any
    uploads: Mapping[str, Artefacts]
    blobs: Blobs = dataclasses.field(init=False, default_factory=Blobs)
    encoded: dict[int, Any] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.encoded.update({id(one): encode_artefacts(one, self.blobs) for one in self.uploads.values()})

    def aggregate(self, uploads: Mapping[str, Artefacts], device: str = "cpu") -> RoundResult:
        blobs = Blobs(self.blobs)
        manifests = {}
        for client, artefacts in uploads.items():
            known = self.encoded.get(id(artefacts))
            encoded = encode_artefacts(artefacts, blobs) if known is None else known
            manifests[client] = Manifest("up", "f", client, 0, 1, encoded.blobs, encoded.facts)
        publisher = Publisher("f", blobs, EagerExporter(), ())
        aggregation = Aggregation(
            self.spec, self.method, sampler_of(self.method), blobs, publisher, Terms(device=torch.device(device))
        )
        return aggregation.run(0, manifests, None)


@functools.cache
def fleet(name: str) -> Fleet:
    """Three honest clients: one trains, the others' models are its own with a little noise, as other data make."""
    kind, settings = resolved(name, "tiny")
    quick: dict[str, Any] = {"local_epochs": 1, "batch_size": 8}
    if kind == "pfedgrp":
        quick |= {"replay_per_client": 4, "gan_batch_size": 8, "aggregation_epochs": 1}
    spec = make_spec("f", kind, TOY, preset="tiny", overrides=quick | settings, run_seed=0)
    method = method_of(spec)
    initial = method.initial_download(seeded_generator(0, 0, "initial"))
    state, _ = method.initial_states()
    data = toy_data({0: 8, 1: 8})
    _, upload = method.local_round(state, data, initial, seeded_generator(0, 0, "a"), sampler=sampler_of(method))
    packed = upload.pack()
    return Fleet(spec, method, {client: noisy(packed, seed) for seed, client in enumerate(("cam-1", "cam-2", "cam-3"))})


def changed(artefacts: Artefacts, change: Callable[[str, str, torch.Tensor], torch.Tensor]) -> Artefacts:
    """Return artefacts with each floating tensor put through ``change(set name, tensor name, tensor)``, kept finite."""

    def within(made: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        most = torch.finfo(t.dtype).max
        return made.clamp(-most, most).to(t.dtype)

    sets = {
        name: {key: within(change(name, key, t), t) if t.is_floating_point() else t for key, t in parameters.items()}
        for name, parameters in artefacts.parameter_sets.items()
    }
    return Artefacts(sets, artefacts.facts)


def noisy(artefacts: Artefacts, seed: int) -> Artefacts:
    rng = torch.Generator().manual_seed(seed)

    def change(name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=rng)
        return tensor * (1 + 0.05 * noise) if seed else tensor

    return changed(artefacts, change)


def scaled(factor: float) -> Callable[[Artefacts], Artefacts]:
    return lambda artefacts: changed(artefacts, lambda name, key, t: torch.clamp(t.double() * factor, -3e38, 3e38))


def only(part: str, factor: float) -> Callable[[Artefacts], Artefacts]:
    """Scale the tensors whose set and name hold ``part``."""
    return lambda artefacts: changed(artefacts, lambda name, key, t: t * factor if part in f"{name} {key}" else t)


def diverged(artefacts: Artefacts) -> Artefacts:
    """An honest client whose training ran away: every weight is noise of ten times its size."""
    rng = torch.Generator().manual_seed(9)

    def change(name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim < 2:
            return tensor
        return tensor + 10 * tensor.std() * torch.randn(tensor.shape, generator=rng)

    return changed(artefacts, change)


def counted(count: int) -> Callable[[Artefacts], Artefacts]:
    """Claim so many samples, in whichever way the method counts them."""

    def change(artefacts: Artefacts) -> Artefacts:
        facts = dict(artefacts.facts)
        by_class = {name: dict.fromkeys(facts[name], count) for name in ("seen", "counts") if name in facts}
        return Artefacts(
            artefacts.parameter_sets, facts | by_class | dict.fromkeys({"num_samples"} & facts.keys(), count)
        )

    return change


def ticked(count: int) -> Callable[[Artefacts], Artefacts]:
    """Set what BatchNorm counts."""

    def change(artefacts: Artefacts) -> Artefacts:
        sets = {
            name: {
                key: torch.full_like(t, count) if key.endswith("num_batches_tracked") else t
                for key, t in parameters.items()
            }
            for name, parameters in artefacts.parameter_sets.items()
        }
        return Artefacts(sets, artefacts.facts)

    return change


PILLS: dict[str, Callable[[Artefacts], Artefacts]] = {
    "times 3": scaled(3),
    "times 5": scaled(5),
    "times 20": scaled(20),
    "times 1e4": scaled(1e4),
    "times 1e20": scaled(1e20),
    "all 3e38": scaled(1e45),
    "sign turned": scaled(-1),
    "2^40 samples": counted(2**40),
    "negative variances": only("running_var", -1.0),
    "huge BatchNorm buffers": only("running_mean", 1e5),
    "a negative counter": ticked(-1),
    "2^62 in a counter": ticked(1 << 62),
    "head times 30": only("task head", 30.0),
    "diverged": diverged,
}
QUICK = ("times 20", "2^40 samples")
SPECIAL_PILLS: dict[str, dict[str, Callable[[Artefacts], Artefacts]]] = {
    "sub-generator/": {
        "huge sub-generators": only("sub-generator/", 1e4),
        "sub-generators times 3": only("sub-generator/", 3.0),
    },
    "fisher": {"huge curvature": only("fisher", 1e5)},
    "gradient": {"huge gradient": only("gradient", 1e3)},
}
"""Beginning of a set's name -> what only uploads with such a set can hold."""


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
    sets = fleet(name).uploads["cam-2"].parameter_sets
    special = {part: pills for part, pills in SPECIAL_PILLS.items() if any(each.startswith(part) for each in sets)}
    pills = pills | {pill: make for pills in special.values() for pill, make in pills.items()}
    assert {pill: outcome_of(name, make, "cam-2") for pill, make in pills.items()} == dict.fromkeys(pills, "left out")


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


def test_what_all_clients_share_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg's average stands in the state and in the download of every client: it was encoded for each of them."""
    encoded: list[object] = []
    real = artefact_codec.encode_parameters
    uploads = fleet("fedavg").uploads
    monkeypatch.setattr(artefact_codec, "encode_parameters", lambda each: encoded.append(each) or real(each))
    fleet("fedavg").aggregate(uploads)
    assert len(encoded) == 1
