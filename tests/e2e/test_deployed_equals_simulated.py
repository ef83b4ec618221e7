"""The simulator and the deployed fleet compute the same bits: same method, stream, seeds, sampler and threads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.client_world import PFEDGRP, TrainerThread
from support.image_sets import idx_bytes

from replayfleet.aggregator.founding import Fleet
from replayfleet.aggregator.rounds.machine import RoundRules
from replayfleet.aggregator.service import AggregatorService
from replayfleet.aggregator.serving import OnnxExporter
from replayfleet.edge_client.service import ClientService, Identity
from replayfleet.edge_client.sources import source_opener
from replayfleet.edge_client.state_store import StateStore
from replayfleet.edge_client.sync.parts import Compute
from replayfleet.export.graphs.graph import sub_generator_graph
from replayfleet.export.running.sampler import onnx_sampler
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit import travel
from replayfleet.federation.methods.kit.each import Map
from replayfleet.federation.methods.kit.records import Method, Sampler
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.steps import serving
from replayfleet.federation.methods.steps.memory import kind_of, sampler_of
from replayfleet.federation.methods.steps.serving import BEST, Served
from replayfleet.federation.service.artefact_codec import encode_artefacts, encode_parameters
from replayfleet.federation.service.cluster.engine import HERE, RayEngine
from replayfleet.federation.service.fleet.presets import settings_for
from replayfleet.federation.service.fleet.spec import build_method, make_spec, method_of
from replayfleet.federation.service.fleet.task import task_of
from replayfleet.federation.service.fleet.variants import VARIANTS, resolved
from replayfleet.federation.service.jobs import Jobs
from replayfleet.federation.service.torch_setup import prepare_torch
from replayfleet.federation.simulator.measures.accounts import DigestOnly
from replayfleet.federation.simulator.simulation import RoundOutcome, Simulation
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.federation.streams.stream import Stream, StreamSettings
from replayfleet.federation.wire.protocol.messages import FleetSpec
from replayfleet.federation.wire.protocol.tensors import digest
from replayfleet.federation.wire.transport.broker import open_broker
from replayfleet.federation.wire.transport.interfaces import OnMessage, Session, Will
from replayfleet.federation.wire.transport.mqtt import MqttSession
from replayfleet.models.specs import TaskSpec
from tests.support.memory_broker import MemoryBroker

NUM_CLIENTS, SAMPLES, SEED, RUN_SEED = 2, 8, 5, 11
NAMES = [f"client-{index}" for index in range(NUM_CLIENTS)]
SMALL = {"pfedgrp", "der"}
"""Methods that are tried with a small network; a residual one, with BatchNorm, serves the others."""
STRIDE = 128
"""Bytes from one place of a file to the next where a picture is looked for; it is longer in any form."""

Connect = Callable[[str, OnMessage, Will | None], Session]


def write_noisy_fashion_mnist(folder: Path) -> None:
    """Write the four idx files with images that differ, so that every sample matters."""
    rng = np.random.default_rng(0)
    for prefix, per_class in (("train", 2 * SAMPLES), ("t10k", 4)):
        labels = np.tile(np.arange(10, dtype=np.uint8), per_class)
        images = rng.integers(0, 120, (len(labels), 28, 28), dtype=np.uint8) + 10 * labels[:, None, None]
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(idx_bytes(array))


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_noisy_fashion_mnist(folder)
    return folder


def num_rounds(method: str) -> int:
    """Two rounds pass on all that a method carries; in a third pFedGRP trains again what it has."""
    return 3 if method.partition("+")[0] == "pfedgrp" else 2


def task_for(name: str, data_root: Path) -> TaskSpec:
    task = replace(load_dataset("fashion-mnist", data_root=data_root).task, generator_width=4)
    if name in SMALL:
        return replace(task, architecture="lenet")
    return replace(task, architecture="resnet20-he", stem="imagenet")  # few parameters; its first layers halve twice


def spec_of(name: str, data_root: Path) -> FleetSpec:
    name, _, more = name.partition("+")
    task = task_for(name, data_root)
    method, changes = resolved(name, "tiny")
    overrides = {**(PFEDGRP if method == "pfedgrp" else {"local_epochs": "1", "batch_size": "8"}), **changes}
    if more in travel.MODELS:
        overrides["models_travel_as"] = more
        if method == "pfedgrp":
            overrides["sub_generators_travel_as"] = "float16"
    elif more == BEST:
        overrides["serve"] = BEST
    elif more:
        overrides["robust"] = more
    return make_spec("fleet", method, task, preset="tiny", overrides=overrides, run_seed=RUN_SEED)


def built_at_tiny(name: str, data_root: Path) -> Method:
    if name in METHODS and not METHODS[name].deployable:
        kind, task = METHODS[name], task_for(name, data_root)
        known = [field.name for field in dataclasses.fields(kind)]
        return build_method(kind, task, settings_for(name, "tiny", known=known))
    return method_of(spec_of(name, data_root))


def simulated(
    method: str, data_root: Path, sampler_name: str, run_seed: int = RUN_SEED, where: str = HERE
) -> dict[str, dict[str, str]]:
    """Return client -> parameter set -> digest of the last download, from the simulator."""
    return last_round(method, data_root, sampler_name, run_seed, where)[0]


def choices(method: str, data_root: Path) -> dict[str, tuple[Served, str]]:
    """Return client -> what it chose to serve after the last round, and the digest of that, from the simulator."""
    return last_round(method, data_root, "eager")[1]


@functools.cache
def last_round(
    method: str, data_root: Path, sampler_name: str, run_seed: int = RUN_SEED, where: str = HERE
) -> tuple[dict[str, dict[str, str]], dict[str, tuple[Served, str]]]:
    """Return what ``simulated`` and ``choices`` tell, from one simulation."""
    last = outcome(method, data_root, sampler_name, run_seed, where)
    chosen = {name: (one.served, digest(encode_parameters(one.parameters))) for name, one in last.chosen.items()}
    return {name: digests_of(download) for name, download in last.downloads.items()}, chosen


def held_choice(folder: Path) -> tuple[Served, str]:
    """Return the same from a device's disk."""
    held = StateStore(folder).held()
    assert held.choice is not None
    one, serving = held.choice, held.served.serving
    assert serving is not None
    digests = {entry.name: entry.digest for entry in held.served.blobs}
    return Served(one.name, one.scores, one.gain, one.error, one.lost), digests[serving.parameters]


def digests_of(record: Any) -> dict[str, str]:
    return {entry.name: entry.digest for entry in encode_artefacts(record.pack(), DigestOnly()).blobs}


def outcome(
    method: str, data_root: Path, sampler_name: str, run_seed: int = RUN_SEED, where: str = HERE
) -> RoundOutcome:
    """Return the last round of a simulation."""
    dataset = load_dataset("fashion-mnist", data_root=data_root)
    settings = StreamSettings(
        scenario="circulating",
        num_clients=NUM_CLIENTS,
        num_rounds=num_rounds(method),
        samples_per_class=SAMPLES,
        seed=SEED,
    )
    stream = Stream(settings, dataset.train.labels, dataset.test.labels, dataset.task.num_classes)
    built = built_at_tiny(method, data_root)
    last: list[RoundOutcome] = []
    Simulation(
        method=built,
        dataset=dataset,
        stream=stream,
        run_seed=run_seed,
        sampler=sampler_named(sampler_name, built),
        num_threads=1,
        num_workers=1 if where == HERE else 2,
        engine=where,
    ).run(on_round=last.append)
    initial = built.initial_download(seeded_generator(run_seed, 0, "initial"))
    for name, download in last[-1].downloads.items():  # after a restart or a resumed run that is what a client gets
        assert digests_of(built.download_for(last[-1].aggregator_state, name, initial)) == digests_of(download)
    return last[-1]


def sampler_named(name: str, method: Method) -> Sampler:
    kind = kind_of(method)
    if name == "eager" or kind is None or kind.graph_spec is None:
        return sampler_of(method)
    return onnx_sampler(sub_generator_graph(kind.graph_spec), 1)


def deployed(  # the last has a default
    method: str,
    data_root: Path,
    folder: Path,
    connect: Connect,
    sampler: str,
    order: list[int],
    spread: Map | None = None,
) -> dict[str, dict[str, str]]:
    """Return the same from a fleet of real services, whose clients start in ``order``."""
    spec = spec_of(method, data_root)
    built = method_of(spec)
    task = task_of(spec)
    rules = RoundRules(NUM_CLIENTS, min_clients=NUM_CLIENTS, deadline_s=3600.0, num_rounds=num_rounds(method))
    fleet = Fleet(spec, built, sampler_of(built), OnnxExporter(built, task), rules, spread=spread)
    (folder / "aggregator").mkdir(parents=True)
    aggregator = AggregatorService(
        fleet, folder / "aggregator", connect, jobs=partial(Jobs, prepare=partial(prepare_torch, 1))
    )
    aggregator.start()
    clients: dict[str, ClientService] = {}
    try:
        for index in order:
            uri = (
                f"dataset://fashion-mnist?scenario=circulating&clients={NUM_CLIENTS}&client={index}"
                f"&rounds={num_rounds(method)}&samples={SAMPLES}&seed={SEED}&rate=5"
            )
            name = NAMES[index]
            (folder / name).mkdir()
            identity = Identity("fleet", name, "cpu", Compute(sampler=sampler, training_threads=1))  # type: ignore[arg-type]
            service = ClientService(
                identity,
                folder / name,
                connect,
                source_opener([uri], folder / name, data_root),
                spawn=TrainerThread,
            )
            service.start()
            clients[name] = service
        end = time.monotonic() + 1800
        while not all(client.client.finished for client in clients.values()):
            assert time.monotonic() < end, {name: client.status() for name, client in clients.items()}
            aggregator.loop.pump(0.01)
            for client in clients.values():
                client.loop.pump(0.01)
    finally:
        for client in clients.values():
            client.stop()
        aggregator.stop()
    return {name: held_parameters(folder / name, num_rounds(method)) for name in clients}


def held_parameters(folder: Path, round_index: int) -> dict[str, str]:
    held = StateStore(folder).held()
    assert held.manifest.round == round_index
    return {entry.name: entry.digest for entry in held.manifest.blobs if not entry.name.startswith("graph/")}


def through(broker: MemoryBroker) -> Connect:
    return lambda client_id, on_message, will: broker.session(client_id, on_message=on_message, will=will)


def duplicating(broker: MemoryBroker) -> Connect:
    """Deliver every message of a client twice."""

    def connect(client_id: str, on_message: OnMessage, will: Will | None) -> Session:
        def twice(topic: str, payload: bytes) -> None:
            on_message(topic, payload)
            on_message(topic, payload)

        return broker.session(client_id, on_message=twice, will=will)

    return connect


def draws_with_graphs(method: str, data_root: Path) -> bool:
    """Whether clients can run its sub-generators as ONNX graphs."""
    kind = kind_of(method_of(spec_of(method, data_root)))
    return kind is not None and kind.graph_spec is not None


@functools.cache
def forms_of_pictures(data_root: Path) -> list[tuple[bytes, ...]]:
    """Return every training picture of the data set as bytes, floats and half floats.

    Eight rows from its middle stand for it: these differ from those of all others.
    """
    rows = load_dataset("fashion-mnist", data_root=data_root).train.images[:, 10:18, :, 0]
    scaled = np.float32(rows) / np.float32(127.5) - np.float32(1)
    return [tuple(form.tobytes() for form in each) for each in zip(rows, scaled, np.float16(scaled), strict=True)]


@functools.cache
def pictures_with(data_root: Path) -> dict[bytes, set[int]]:
    """Return which pictures have these eight bytes somewhere in the first ``STRIDE`` of a form."""
    found: dict[bytes, set[int]] = {}
    for index, forms in enumerate(forms_of_pictures(data_root)):
        for form in forms:
            assert len(form) >= STRIDE + 8
            for at in range(STRIDE):
                found.setdefault(form[at : at + 8], set()).add(index)
    return found


def pictures_below(folder: Path, data_root: Path) -> int:
    """Return how many training pictures of the data set lie in files below a folder, in any of their forms."""
    everything = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    # wherever a form begins, one of these places is among its first: only pictures that fit there are looked for
    words = {everything[at : at + 8] for at in range(0, len(everything), STRIDE)}
    known = pictures_with(data_root)
    likely = set().union(*(known[word] for word in words & known.keys()))
    return sum(any(form in everything for form in forms_of_pictures(data_root)[index]) for index in likely)


def rounds_in_memory() -> set[int]:
    """The memory files of rounds that this process has open, another test's among them."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread closed it
            if link.readlink().name.startswith("memfd:round-data"):
                found.add(link.stat().st_ino)
    return found


EVERY_METHOD = sorted({name for name, method in METHODS.items() if method.deployable} | VARIANTS.keys())


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_method_in_a_fleet_equals_the_simulator_to_the_bit_and_stores_what_it_says(
    method: str, data_root: Path, tmp_path: Path, served_here: None
) -> None:
    """Two rounds over a broker, clients and all; then every file that they and the aggregator left is looked into."""
    before = rounds_in_memory()
    sampler = "onnx" if draws_with_graphs(method, data_root) else "eager"
    with open_broker(log=logging.getLogger("test")) as broker:

        def connect(client_id: str, on_message: OnMessage, will: Will | None) -> Session:
            return MqttSession(broker.url, client_id, on_message=on_message, will=will)

        found = deployed(method, data_root, tmp_path, connect, sampler, [0, 1])
    assert found == simulated(method, data_root, sampler)
    stores = METHODS[resolved(method, "tiny")[0]].stores_data
    assert [bool(pictures_below(tmp_path / name, data_root)) for name in NAMES] == [stores] * NUM_CLIENTS
    assert not pictures_below(tmp_path / "aggregator", data_root)
    assert rounds_in_memory() <= before, "its rounds are over"


@pytest.mark.parametrize("method", sorted(name for name, each in METHODS.items() if not each.deployable))
def test_methods_of_the_simulator_alone_run_two_rounds_to_the_same_bits_and_store_nothing(
    method: str, data_root: Path, tmp_path: Path
) -> None:
    first, again = outcome(method, data_root, "eager"), outcome(method, data_root, "eager")
    assert not METHODS[method].stores_data
    for name in NAMES:
        assert digests_of(first.downloads[name]) == digests_of(again.downloads[name])
        for place, parameters in first.client_states[name].pack().parameter_sets.items():
            (tmp_path / f"{name}-{place.replace('/', '-')}").write_bytes(encode_parameters(parameters))
    assert not pictures_below(tmp_path, data_root)


def test_clients_that_run_sub_generators_in_pytorch_equal_the_simulator_too(
    data_root: Path, tmp_path: Path, served_here: None
) -> None:
    found = deployed("pfedgrp", data_root, tmp_path, through(MemoryBroker()), "eager", [0, 1])
    assert found == simulated("pfedgrp", data_root, "eager")


@pytest.mark.parametrize("method", ["pfedgrp+multi-krum", "pfedgrp+median", "fedavg+trimmed-mean", "der+krum"])
def test_robust_averages_of_the_fleet_equal_the_simulators_to_the_bit(
    method: str, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served_here: None
) -> None:
    monkeypatch.setattr(f"{__name__}.NUM_CLIENTS", 3)  # of two uploads all are trusted
    monkeypatch.setattr(f"{__name__}.NAMES", [f"client-{index}" for index in range(3)])
    found = deployed(method, data_root, tmp_path, through(MemoryBroker()), "eager", [2, 0, 1])
    assert found == simulated(method, data_root, "eager")


@pytest.mark.parametrize("method", ["pfedgrp+int8", "pfedgrp+float16", "fedavg+int8", "der+int8"])
def test_rounded_values_of_the_fleet_equal_the_simulators_to_the_bit(
    method: str, data_root: Path, tmp_path: Path, served_here: None
) -> None:
    found = deployed(method, data_root, tmp_path, through(MemoryBroker()), "eager", [0, 1])
    assert found == simulated(method, data_root, "eager")
    assert found != simulated(method.partition("+")[0], data_root, "eager")
    spooled = {path.name.count(".") for path in (tmp_path / "aggregator").rglob("*.packed")}
    assert spooled >= ({2} if method.endswith("int8") else {1})  # differences, and what stands alone


@pytest.mark.parametrize("method", ["pfedgrp+best", "pfedgrp-plus+best"])
def test_what_devices_choose_to_serve_and_learn_from_it_equals_the_simulators_to_the_bit(
    method: str, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served_here: None
) -> None:
    monkeypatch.setattr(serving, "NUM_REPLAYED", 64)
    before = rounds_in_memory()
    found = deployed(method, data_root, tmp_path, through(MemoryBroker()), "eager", [0, 1])
    assert found == simulated(method, data_root, "eager")
    assert found != simulated(method.partition("+")[0], data_root, "eager")
    assert {name: held_choice(tmp_path / name) for name in NAMES} == choices(method, data_root)
    assert rounds_in_memory() <= before, "all were chosen by"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_on_ray_all_stays_equal_though_workers_are_killed_while_they_aggregate(
    data_root: Path, tmp_path: Path, served_here: None
) -> None:
    pytest.importorskip("ray")
    expected = simulated("pfedgrp", data_root, "eager")
    assert simulated("pfedgrp", data_root, "eager", where="ray") == expected
    broker, killed = MemoryBroker(), tmp_path / "killed"
    killed.mkdir()

    def connect(client_id: str, on_message: OnMessage, will: Will | None) -> Session:
        return broker.session(client_id, on_message=on_message, will=will)

    def deadly(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        calls.append(len(calls))

        def sometimes(item: Any) -> Any:
            mark = killed / str(len(calls))
            if len(calls) == 2 and not mark.exists():  # Eq. 3 of the first round; replay was drawn before
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(item)

        return cluster.map(sometimes, items)

    calls: list[int] = []
    with contextlib.closing(RayEngine("ray", 1, 2, start_s=None)) as cluster:
        assert deployed("pfedgrp", data_root, tmp_path, connect, "eager", [0, 1], deadly) == expected
    assert list(killed.iterdir())
    assert len(calls) == 2 * num_rounds("pfedgrp")


def test_arrival_order_and_duplicated_messages_change_nothing(
    data_root: Path, tmp_path: Path, served_here: None
) -> None:
    expected = simulated("pfedgrp", data_root, "eager")
    assert deployed("pfedgrp", data_root, tmp_path, duplicating(MemoryBroker()), "eager", [1, 0]) == expected


def test_the_comparison_can_fail(data_root: Path) -> None:
    """Another run seed gives other parameters: equality above is not an accident of a model that never trains."""
    first, second = (simulated("fedavg", data_root, "eager", seed) for seed in (RUN_SEED, RUN_SEED + 1))
    assert first.keys() == second.keys()
    assert all(set(first[name].values()).isdisjoint(second[name].values()) for name in first)
