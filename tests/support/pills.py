"""Finite uploads that stopped a fleet, by method, and fleets of a few clients that get one of them."""

from __future__ import annotations

import dataclasses
import functools
import mmap
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from replayfleet.aggregator.aggregation import Aggregation, RoundResult, Terms
from replayfleet.aggregator.publisher import Exporter, Publisher, export_graphs
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.records import Artefacts, Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.federation.service.artefact_codec import encode_artefacts
from replayfleet.federation.service.fleet.spec import make_spec, method_of
from replayfleet.federation.service.fleet.variants import VARIANTS, resolved
from replayfleet.federation.wire.protocol.messages import Manifest, Probe
from replayfleet.federation.wire.protocol.tensors import digest
from tests.support.toy import TOY, toy_data

DEPLOYED = sorted(name for name, method in METHODS.items() if method.deployable and name != "centralized")
VARIED = sorted(name for name, (method, _) in VARIANTS.items() if method in DEPLOYED)


Pill: TypeAlias = Callable[[Artefacts], Artefacts]
"""An honest client's upload -> what is sent instead."""


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

    def aggregate(
        self, uploads: Mapping[str, Artefacts], device: str = "cpu", exporter: Exporter | None = None
    ) -> RoundResult:
        """Run a round on stored uploads, behind a gate; ``EagerExporter`` if none is given."""
        aggregation, manifests = self.prepared(uploads, device, exporter)
        return aggregation.run(0, manifests, None)

    def prepared(
        self, uploads: Mapping[str, Artefacts], device: str = "cpu", exporter: Exporter | None = None
    ) -> tuple[Aggregation, dict[str, Manifest]]:
        blobs = Blobs(self.blobs)
        manifests = {}
        for client, artefacts in uploads.items():
            known = self.encoded.get(id(artefacts))
            encoded = encode_artefacts(artefacts, blobs) if known is None else known
            manifests[client] = Manifest("up", "f", client, 0, 1, encoded.blobs, encoded.facts)
        gate = EagerExporter() if exporter is None else exporter
        publisher = Publisher("f", blobs, gate, export_graphs(blobs, gate))
        aggregation = Aggregation(
            self.spec, self.method, sampler_of(self.method), blobs, publisher, Terms(device=torch.device(device))
        )
        return aggregation, manifests


@functools.cache
def fleet(name: str, clients: int = 3) -> Fleet:
    """Honest clients: one trains, the others' models are its own with a little noise, as other data make."""
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
    return Fleet(spec, method, {f"cam-{seed + 1}": noisy(packed, seed) for seed in range(clients)})


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


def scaled(factor: float) -> Pill:
    return lambda artefacts: changed(artefacts, lambda name, key, t: torch.clamp(t.double() * factor, -3e38, 3e38))


def only(part: str, factor: float) -> Pill:
    """Scale the tensors whose set and name hold ``part``."""
    return lambda artefacts: changed(artefacts, lambda name, key, t: t * factor if part in f"{name} {key}" else t)


def shifted(part: str, by: float) -> Pill:
    """Add to the vectors whose set and name hold ``part``."""
    return lambda artefacts: changed(
        artefacts, lambda name, key, t: t + by if t.ndim == 1 and part in f"{name} {key}" else t
    )


def diverged(artefacts: Artefacts) -> Artefacts:
    """An honest client whose training ran away: every weight is noise of ten times its size."""
    rng = torch.Generator().manual_seed(9)

    def change(name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim < 2:
            return tensor
        return tensor + 10 * tensor.std() * torch.randn(tensor.shape, generator=rng)

    return changed(artefacts, change)


def counted(count: int) -> Pill:
    """Claim so many samples, in whichever way the method counts them."""

    def change(artefacts: Artefacts) -> Artefacts:
        facts = dict(artefacts.facts)
        by_class = {name: dict.fromkeys(facts[name], count) for name in ("seen", "counts") if name in facts}
        return Artefacts(
            artefacts.parameter_sets, facts | by_class | dict.fromkeys({"num_samples"} & facts.keys(), count)
        )

    return change


def ticked(count: int) -> Pill:
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


PILLS: dict[str, Pill] = {
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
    "dead channels": shifted("bias", -40.0),
    "a negative counter": ticked(-1),
    "2^62 in a counter": ticked(1 << 62),
    "head times 30": only("task head", 30.0),
    "diverged": diverged,
}
SPECIAL_PILLS: dict[str, dict[str, Pill]] = {
    "sub-generator/": {
        "huge sub-generators": only("sub-generator/", 1e4),
        "sub-generators times 3": only("sub-generator/", 3.0),
    },
    "fisher": {"huge curvature": only("fisher", 1e5)},
    "gradient": {"huge gradient": only("gradient", 1e3)},
}
"""Beginning of a set's name -> what only uploads with such a set can hold."""


def pills_of(members: Fleet, common: Mapping[str, Pill] = PILLS) -> dict[str, Pill]:
    """Return these pills, and those that only uploads of this fleet's method can hold."""
    sets = members.uploads["cam-2"].parameter_sets
    special = [pills for part, pills in SPECIAL_PILLS.items() if any(each.startswith(part) for each in sets)]
    return {**common, **{what: pill for pills in special for what, pill in pills.items()}}
