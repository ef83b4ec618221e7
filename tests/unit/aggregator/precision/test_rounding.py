"""Rounded models of real graphs: what a client is given, and what becomes of everything that goes wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch

from replayfleet.aggregator.precision import rounding
from replayfleet.aggregator.precision.replay import Replay
from replayfleet.aggregator.precision.rounding import Rounder
from replayfleet.aggregator.precision.rules import PrecisionRules, allowed_of, check_precisions
from replayfleet.aggregator.precision.wishes import Wish
from replayfleet.aggregator.store import StoredArtefacts
from replayfleet.edge_client.learning.training.job import parameter_sets_of
from replayfleet.edge_client.serving.loading import load_model
from replayfleet.edge_client.serving.messages import Load
from replayfleet.export.graphs.graph import task_graph
from replayfleet.export.running.artefact import Array, check_probe, make_probe
from replayfleet.export.running.facts import task_facts
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.service.artefact_codec import encode_parameters
from replayfleet.federation.wire.protocol.limits import check_manifest
from replayfleet.federation.wire.protocol.messages import TASK_GRAPH, BlobEntry, FleetSpec, Manifest, Serving
from replayfleet.federation.wire.protocol.tensors import decode_arrays
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec

TASK = TaskSpec(1, 32, ("cat", "dog"), architecture="lenet")
SPEC = FleetSpec("street", "pfedgrp", {}, msgspec.to_builtins(TASK), 1)
ANYTHING = PrecisionRules(max_loss_points=100.0)


class World:
    """A blob store with the float32 models of some clients, and sub-generators that draw one brightness each."""

    def __init__(self, folder: Path, rules: PrecisionRules = ANYTHING) -> None:
        self.folder = folder
        self.blobs = DiskBlobStore(folder / "blobs")
        self.drawn: list[float] = []
        self.rounder = Rounder(SPEC, TASK, self.blobs, self.sampler, rules)
        self.state = StoredArtefacts((), "cc" * 32)

    def sampler(self, parameters: Any) -> Any:
        shade = float(parameters["shade"][0])

        def draw(latents: torch.Tensor) -> torch.Tensor:
            self.drawn.append(shade)
            noise = torch.rand(len(latents), *TASK.image_shape, generator=torch.Generator().manual_seed(0))
            return shade + noise / 10

        return draw

    def holds(self, **shades: float) -> None:
        """The method's state has a sub-generator of each of these clients."""
        entries = []
        for client, shade in shades.items():
            data = encode_parameters({"shade": torch.tensor([shade])})
            entries.append(BlobEntry(f"clients/{client}/sub-generator/0", self.blobs.put(data), len(data)))
        self.state = StoredArtefacts(tuple(entries), "cc" * 32)

    def draft(self, client: str, seed: int = 0, *, scale: float = 1.0) -> Manifest:
        module = initialise(build_task_model(TASK), seeded_generator(seed, 0, "initial"))
        parameters = {name: tensor * scale for name, tensor in module.state_dict().items()}
        graph, data = task_graph(TASK), encode_parameters(parameters)
        entries = (
            BlobEntry(TASK_GRAPH, self.blobs.put(graph), len(graph)),
            BlobEntry("personalised", self.blobs.put(data), len(data)),
        )
        model = OnnxModel(graph, {name: tensor.numpy() for name, tensor in parameters.items()}, num_threads=1)
        serving = Serving(TASK_GRAPH, "personalised", make_probe(model.run, TASK.image_shape, seed=0))
        return Manifest("down", "street", client, 3, 0, entries, serving=serving)

    def rounded(self, *drafts: Manifest, **wishes: str) -> tuple[dict[str, Manifest], dict[str, str]]:
        asked = {client: Wish(precision) for client, precision in wishes.items()}
        return self.rounder.rounded({draft.client_id: draft for draft in drafts}, asked, self.state)

    def answers(self, manifest: Manifest, images: Array) -> Array:
        """What a device that serves this manifest says, loaded as a device loads it; its golden vector is proved."""
        check_manifest(msgspec.structs.replace(manifest, version=1))
        assert manifest.serving is not None
        digests = {entry.name: entry.digest for entry in manifest.blobs}
        graph, parameters = digests[manifest.serving.graph], digests[manifest.serving.parameters]
        folder = str(self.folder / "blobs")
        loaded = load_model(
            Load(folder, graph, parameters, TASK.image_shape, 1, ("CPUExecutionProvider",), task_facts(TASK))
        )
        check_probe(loaded.run, manifest.serving.probe, TASK.image_shape, TASK.output_shape)
        return loaded.run(images)


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.holds(a=-0.5, b=0.5)
    return world


@pytest.mark.parametrize(("precision", "share", "off"), [("fp16", 0.55, 0.01), ("int8", 0.35, 0.2)])
def test_a_device_serves_a_smaller_model_that_answers_alike_and_trains_from_the_same_parameters(
    world: World, precision: str, share: float, off: float
) -> None:
    draft = world.draft("a")
    drafts, exact = world.rounded(draft, world.draft("b"), a=precision)
    rounded = drafts["a"]
    assert exact == {}
    assert drafts["b"].serving.precision == "fp32"  # type: ignore[union-attr]
    assert (rounded.serving.precision, rounded.serving.model) == (precision, "personalised")  # type: ignore[union-attr]
    assert parameter_sets_of(rounded) == parameter_sets_of(draft)
    sizes = {entry.name: entry.size_bytes for entry in rounded.blobs}
    assert sizes[f"graph/task-{precision}"] < share * sizes["personalised"] + 20_000
    images = np.random.default_rng(0).uniform(-0.6, -0.3, (32, *TASK.image_shape)).astype(np.float32)
    expected, found = world.answers(draft, images), world.answers(rounded, images)
    assert 0 < np.abs(found - expected).max() < off


def test_equal_drafts_give_equal_bytes(world: World) -> None:
    one, other = (world.rounded(world.draft("a"), a="int8")[0]["a"] for _ in range(2))
    assert one == other


def test_a_model_is_calibrated_with_what_its_own_clients_draw_and_rounded_once_for_all_of_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = rounding.rounded_model
    monkeypatch.setattr(rounding, "rounded_model", lambda *args: made.append(args) or real(*args))
    drafts, _ = world.rounded(world.draft("a", seed=1), a="int8")
    assert set(world.drawn) == {-0.5}
    world.drawn.clear()
    world.rounded(world.draft("c"), c="int8")  # a late joiner has none of its own
    assert set(world.drawn) == {-0.5, 0.5}
    made.clear()
    drafts, _ = world.rounded(world.draft("a"), world.draft("b"), a="int8", b="int8")
    assert len(made) == 1
    shared = {entry.name for entry in drafts["a"].blobs if entry.shared}
    assert shared == {"graph/task-int8", "graph/rounded-from/personalised"}


def test_without_replay_the_operators_images_serve_or_nobody_is_given_a_rounded_model(tmp_path: Path) -> None:
    world = World(tmp_path / "without")
    drafts, exact = world.rounded(world.draft("a"), a="fp16")
    assert "no sub-generators to draw replay from" in exact["a"]
    assert drafts["a"].notice == exact["a"]
    assert drafts["a"].serving == world.draft("a").serving
    images = np.random.default_rng(1).uniform(-1, 1, (150, *TASK.image_shape)).astype(np.float32)
    given = World(tmp_path / "with", PrecisionRules(max_loss_points=100, images=images))
    assert given.rounded(given.draft("a"), a="int8")[1] == {}
    samples = Replay(SPEC, given.sampler, given.blobs, images).samples(["a"], None, 0, calibrated=True)
    assert samples.facts == {"calibration": "100 samples of the operator's"}
    with pytest.raises(SettingsError, match="expected at least 100"):
        World(tmp_path / "few", PrecisionRules(images=images[:50]))


def test_what_loses_too_much_is_not_served_and_the_reason_says_how_much(tmp_path: Path) -> None:
    world = World(tmp_path, PrecisionRules(max_loss_points=-1.0))  # not even a model that agrees wholly
    world.holds(a=0.0)
    drafts, exact = world.rounded(world.draft("a"), a="int8")
    assert "loses 0.00 points of agreement on 1,000 samples" in exact["a"]
    assert drafts["a"].serving.precision == "fp32"  # type: ignore[union-attr]


def test_whatever_goes_wrong_ends_in_float32_and_in_a_reason(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = world.draft("a", scale=1e8)
    drafts, exact = world.rounded(huge, a="fp16")
    assert "float16 ends at 65504" in exact["a"]
    world.holds(a=float("nan"))
    assert "NaN or infinity" in world.rounded(world.draft("a"), a="int8")[1]["a"]
    world.state = StoredArtefacts((BlobEntry("clients/a/sub-generator/0", "ab" * 32, 9),), "cc" * 32)
    assert "can't be made" in world.rounded(world.draft("a"), a="int8")[1]["a"]
    world.holds(a=0.1)
    for odd in ("fp64", "fp32 ", "x" * 5000):
        _, exact = world.rounded(world.draft("a"), a=odd)
        assert "the client wants" in exact["a"]
        assert len(exact["a"]) < 200

    monkeypatch.setattr(rounding, "rounded_model", Mock(side_effect=RuntimeError("a converter's bug")))
    drafts, exact = world.rounded(world.draft("a"), world.draft("b"), a="int8", b="fp16")
    assert all("a converter's bug" in why for why in exact.values())
    assert all(draft.serving.precision == "fp32" for draft in drafts.values())  # type: ignore[union-attr]


def test_a_client_that_refused_one_and_precisions_that_the_operator_forbids_get_float32(tmp_path: Path) -> None:
    world = World(tmp_path, PrecisionRules(allowed=("fp16",)))
    world.holds(a=0.0)
    assert "--precision allows fp16" in world.rounded(world.draft("a"), a="int8")[1]["a"]
    refused = {"a": Wish("fp16", "this device refused fp16: probe-mismatch")}
    _, exact = world.rounder.rounded({"a": world.draft("a")}, refused, world.state)
    assert exact["a"] == "float32 is served: this device refused fp16: probe-mismatch"


def test_what_served_parameters_are_is_found_again(world: World) -> None:
    draft = world.draft("a")
    rounded = world.rounded(draft, a="fp16")[0]["a"]
    assert rounded.serving is not None
    digests = {entry.name: entry.digest for entry in rounded.blobs}
    assert decode_arrays(world.blobs.read(digests[rounded.serving.parameters])) == {}
    assert digests[rounded.serving.model] == draft.blobs[1].digest


@pytest.mark.parametrize("wrong", [("fp32",), ("int4",), ("",), ("none", "fp16")])
def test_precisions_that_there_arent_or_dont_go_together_are_refused(wrong: tuple[str, ...]) -> None:
    check_precisions(("fp16", "int8"))
    check_precisions("none")
    assert allowed_of(("none",)) == ()
    with pytest.raises(SettingsError, match=r"expected fp16 or int8|none goes with no other"):
        check_precisions(wrong)
