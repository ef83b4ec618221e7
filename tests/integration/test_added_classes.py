"""A fleet that learns a class more than it began with: nothing that it knows is lost, and no device needs a hand."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from replayfleet.aggregator.control.growing import GROWING, add_classes
from replayfleet.aggregator.leading import Claim
from replayfleet.aggregator.operator.backup import back_up, restore
from replayfleet.aggregator.serving import OnnxExporter
from replayfleet.aggregator.store import AggregatorStore, added_classes
from replayfleet.edge_client.flow import Samples
from replayfleet.edge_client.learning.training.job import BLOBS
from replayfleet.edge_client.state_store import StateStore, goes_on_under, spec_digest
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.artefact_codec import decode_artefacts
from replayfleet.federation.service.data_dir import claim_data_dir
from replayfleet.federation.service.fleet.growth import extends, grown_spec
from replayfleet.federation.service.fleet.spec import method_of
from replayfleet.federation.service.fleet.task import task_of
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from tests.support.client_world import TASK, ToySource, World, events

pytestmark = pytest.mark.usefixtures("served_here")
MORE = "right"


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(tmp_path, getattr(request, "param", "pfedgrp"), num_rounds=None)
    yield made
    made.close()


def grow(world: World, *names: str) -> None:
    """Stop the aggregator, let the fleet learn these classes too, and start it as an operator does."""
    world.aggregator.stop()
    add_classes(world.folder / "aggregator", names, "tester", time.time())
    spec = grown_spec(world.spec, added_classes(world.folder / "aggregator"))
    task, method = task_of(spec), method_of(spec)
    world.spec = spec
    world.fleet = dataclasses.replace(world.fleet, spec=spec, method=method, exporter=OnnxExporter(method, task))
    world.aggregator = world.start_aggregator()


def committed(world: World) -> int:
    return world.aggregator.coordinator.rounds.index


def memory(world: World, client: str) -> Any:
    """What a client remembers, as its disk has it."""
    folder = world.folder / client
    commit = StateStore(folder).training()
    artefacts = decode_artefacts(commit.state, commit.state_facts, DiskBlobStore(folder / BLOBS))
    return method_of(world.spec).ClientState.unpack(artefacts)


class Grown(ToySource):
    """Once it is told to, its pictures show one more class, whose right half is bright."""

    shows = False

    def samples(self, seed: int, count: int = 16) -> Samples:
        found = super().samples(seed, count)
        if not self.shows:
            return found
        images, labels = found.images.copy(), found.labels.copy()
        labels[::2] = len(TASK.class_names)
        images[::2, :, :, :14], images[::2, :, :, 14:] = -0.7, 0.7
        return Samples(images, labels)


@pytest.mark.parametrize("world", sorted(GROWING), indirect=True)
def test_devices_serve_on_keep_what_they_remember_and_learn_the_new_class(world: World) -> None:
    toys = {name: Grown(number) for number, name in enumerate(("cam-0", "cam-1"))}
    for number, (name, toy) in enumerate(toys.items()):
        world.start_client(name, number, open_source=lambda task, toy=toy: toy.source)
    world.until(lambda: committed(world) >= 1 and all(c.client.serving_version > 1 for c in world.clients.values()))
    before = {name: client.client.serving_version for name, client in world.clients.items()}
    remembered = {name: getattr(memory(world, name), "sub_generators", {}).keys() for name in toys}
    at = committed(world)
    grow(world, MORE)
    assert {name: client.client.serving_version for name, client in world.clients.items()} == before
    for toy in toys.values():
        toy.shows = True
    world.until(lambda: committed(world) >= at + 2)
    world.until(lambda: all(c.client.class_names == (*TASK.class_names, MORE) for c in world.clients.values()))
    for name, client in world.clients.items():
        assert client.client.serving_version > before[name]
        assert not client.client.notice
        own = getattr(memory(world, name), "sub_generators", {}).keys()
        assert own >= remembered[name]
        assert world.spec.method in {"fedavg", "fedprox"} or len(TASK.class_names) in own
        again = [event["detail"] for event in events(world, "upload rejected")]
    assert all("the client trains the round from that" in detail for detail in again), again
    assert [event["round"] for event in events(world, "round committed")] == list(range(committed(world)))
    assert any("will learn right too, 4 classes" in event["detail"] for event in events(world, "operator"))


def test_until_the_class_is_learned_nothing_is_taken_for_it_and_the_rest_is_answered_as_before(world: World) -> None:
    world.start_client("cam-0")
    world.start_client("cam-1", 1)
    world.until(lambda: committed(world) >= 1 and all(c.client.serving_version > 1 for c in world.clients.values()))
    for client in world.clients.values():
        client.stop()
    pictures = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def logits() -> torch.Tensor:
        manifest = AggregatorStore(world.folder / "aggregator").download("cam-0")
        assert manifest is not None
        blobs = DiskBlobStore(world.folder / "aggregator" / "blobs")
        method: Any = method_of(world.spec)
        sets = tuple(entry for entry in manifest.blobs if not entry.name.endswith("onnx") and "graph" not in entry.name)
        return method.predictor(method.Download.unpack(decode_artefacts(sets, manifest.facts, blobs)))(pictures)

    had = logits()
    world.clients.clear()
    grow(world, MORE)
    world.start_client("cam-0")
    world.until(lambda: AggregatorStore(world.folder / "aggregator").download("cam-0") is not None)
    has = logits()
    torch.testing.assert_close(has[:, :3], had)
    torch.testing.assert_close(has[:, 3], had.mean(dim=1))
    assert (has.argmax(dim=1) == had.argmax(dim=1)).all()


def test_uploads_of_the_open_round_are_made_again_and_none_is_lost(world: World) -> None:
    world.start_client("cam-0")
    world.until(lambda: len(world.aggregator.coordinator.rounds.accepted) == 1)
    plan = add_classes_refused_or_planned(world)
    assert "1 upload of it will be made again" in plan
    grow(world, MORE)
    assert not world.aggregator.coordinator.rounds.accepted
    world.start_client("cam-1", 1)
    world.until(lambda: committed(world) >= 1)
    assert world.sources["cam-0"].asked.count(0) == 2


def test_a_device_that_restarts_meanwhile_counts_the_samples_of_its_round_once(world: World) -> None:
    world.start_client("cam-0")
    world.until(lambda: len(world.aggregator.coordinator.rounds.accepted) == 1)
    world.clients.pop("cam-0").stop()
    remembered = memory(world, "cam-0")
    grow(world, MORE)
    world.start_client("cam-0")
    world.start_client("cam-1", 1)
    world.until(lambda: committed(world) >= 1)
    assert world.sources["cam-0"].asked[0] == 0
    now = memory(world, "cam-0")
    assert now.sub_generators.keys() >= remembered.sub_generators.keys()
    commit = StateStore(world.folder / "cam-0").training()
    assert sum(now.seen.values()) == (commit.round + 1) * sum(remembered.seen.values())


def add_classes_refused_or_planned(world: World) -> str:
    """Return the plan; while the aggregator runs in this very process, its data dir isn't claimed."""
    return add_classes(world.folder / "aggregator", [MORE], "tester", 0.0, only_plan=True).text


def test_a_client_that_was_away_follows_when_it_is_back_with_all_that_it_remembers(world: World) -> None:
    world.start_client("cam-0")
    world.start_client("cam-1", 1)
    world.until(lambda: committed(world) >= 1 and world.clients["cam-1"].client.serving_version > 1)
    world.clients.pop("cam-1").stop()
    remembered = memory(world, "cam-1").sub_generators
    grow(world, MORE, "behind")
    back = world.start_client("cam-1", 1)
    assert back.client.class_names == TASK.class_names
    at = committed(world)
    world.until(lambda: committed(world) >= at + 1)
    assert back.client.class_names == (*TASK.class_names, MORE, "behind")
    assert memory(world, "cam-1").sub_generators.keys() >= remembered.keys()


@pytest.mark.parametrize("world", ["fedavg"], indirect=True)
def test_an_aggregator_from_a_copy_of_before_learns_what_the_fleet_learned_since(world: World) -> None:
    world.start_client("cam-0")
    world.start_client("cam-1", 1)
    world.until(lambda: committed(world) >= 1 and all(c.client.serving_version > 1 for c in world.clients.values()))
    earlier, folder = (world.spec, world.fleet), world.folder / "aggregator"
    claim_data_dir(folder, fleet=world.spec.fleet, role="aggregator").close()
    back_up(folder, world.folder / "backup")
    grow(world, MORE)
    at = committed(world)
    world.until(lambda: committed(world) > at and all(MORE in c.client.class_names for c in world.clients.values()))
    world.aggregator.stop()
    made = restore(world.folder / "backup", folder, replace=True)
    assert made.epoch == 2, "above that of the growth, which the backup doesn't know"
    world.spec, world.fleet = earlier[0], dataclasses.replace(earlier[1], claim=Claim.ASK)
    world.aggregator = world.start_aggregator()
    world.until(lambda: world.aggregator.growth == ((MORE,), "who led before"))
    world.until(lambda: all(f"`aggregator add-class {MORE}`" in c.client.ignored for c in world.clients.values()))
    grow(world, MORE)  # what who runs a service does then
    world.until(lambda: committed(world) >= made.round + 2)
    assert all(MORE in c.client.class_names for c in world.clients.values())
    assert world.aggregator.growth is None


@pytest.mark.parametrize("world", ["fedavg"], indirect=True)
def test_a_task_that_is_no_continuation_still_takes_a_new_data_dir(world: World) -> None:
    world.start_client("cam-0")
    world.start_client("cam-1", 1)
    world.until(lambda: committed(world) >= 1 and all(c.client.serving_version > 1 for c in world.clients.values()))
    client, spec = world.clients["cam-0"].client, world.spec
    renamed = {**spec.task, "class_names": ["dark", "bright", "up", "down"]}
    from msgspec.structs import replace

    from replayfleet.edge_client.sync.downloads import agreement

    with pytest.raises(SettingsError, match="learns another task than the one served"):
        client._agree(agreement(replace(spec, task=renamed)))
    assert client.class_names == TASK.class_names


def test_what_extends_an_agreement(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.close()
    spec, more = world.spec, grown_spec(world.spec, [MORE])
    assert extends(more, spec)
    assert not extends(spec, more)
    assert not extends(spec, spec)
    assert not extends(grown_spec(more, ["up"]), grown_spec(spec, ["up"]))
    assert goes_on_under(grown_spec(more, ["up"]), spec_digest(spec))
    assert not goes_on_under(spec, spec_digest(more))
    assert grown_spec(more, [MORE]) == more


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["dark"], "learns 'dark' already"),
        (["up", "up"], "'up' already"),
        (["a\nb"], "class"),
        ([""], "class"),
        (["dark\u200b"], "nobody sees"),
        (["caf\u00e9", "cafe\u0301"], "look alike"),
    ],
)
def test_names_that_are_no_new_classes(names: list[str], said: str, tmp_path: Path) -> None:
    World(tmp_path).close()
    with pytest.raises(SettingsError, match=said):
        add_classes(tmp_path / "aggregator", names, "tester", 0.0)
    assert added_classes(tmp_path / "aggregator") == ()
    joined = "\u0645\u06cc\u200c\u062e"  # a fleet may begin with it, so it may come later
    assert add_classes(tmp_path / "aggregator", [joined], "tester", 0.0, only_plan=True).added == (joined,)


def test_methods_whose_networks_count_classes_say_so(tmp_path: Path) -> None:
    World(tmp_path, "mfcl").close()
    with pytest.raises(SettingsError, match="a fleet takes classes with fedavg, fedavg-replay, fedprox, pfedgrp"):
        add_classes(tmp_path / "aggregator", [MORE], "tester", 0.0)


def test_no_run_no_classes(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no aggregator has run here"):
        add_classes(tmp_path, [MORE], "tester", 0.0)


def test_a_crash_while_classes_are_added_leaves_all_as_it_was(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start_client("cam-0")
    world.start_client("cam-1", 1)
    world.until(lambda: committed(world) >= 1)
    world.aggregator.stop()
    folder = world.folder / "aggregator"

    with monkeypatch.context() as patched:
        patched.setattr(AggregatorStore, "raise_epoch", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            add_classes(folder, [MORE], "tester", 0.0)
    assert added_classes(folder) == ()
    world.aggregator = world.start_aggregator()
    at = committed(world)
    world.until(lambda: committed(world) > at)
    assert np.isfinite(at)
