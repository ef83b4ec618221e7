"""Engines in the background: built beside serving, told of, taken from the cache, given up when it is hopeless.

Builds are real child processes, with engines of paper in place of TensorRT's; the slot is a double that counts.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replayfleet.edge_client.serving.engine_desk import GIVE_UP_AFTER, EngineDesk
from replayfleet.edge_client.serving.model import WorkerModel, Workers
from replayfleet.edge_client.serving.slot import ServedModel
from replayfleet.export.engines import cache
from replayfleet.export.engines.build import EngineBuild
from replayfleet.export.engines.cache import EngineCache
from replayfleet.export.engines.maker import EngineFailed, artefact_digest
from replayfleet.export.running.provider_options import BatchProfile
from replayfleet.federation.wire.protocol.tensors import encode_arrays
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from tests.support.matrix_product import matrix_product
from tests.support.paper_engines import PaperMaker
from tests.support.waiting import until

PAPER = "tests.support.paper_engines"


class Slot:
    """Takes upgrades of the version that is active."""

    def __init__(self) -> None:
        self.active_version = 1
        self.upgrades: list[tuple[int, WorkerModel]] = []

    def upgrade(self, version: int, model: WorkerModel) -> bool:
        if version == self.active_version:
            self.upgrades.append((version, model))
        return version == self.active_version


class Refuses:
    """A build that fails at once."""

    made = 0

    def __init__(self, why: str) -> None:
        self._why = why
        Refuses.made += 1

    def run(self, *_: Any) -> None:
        raise EngineFailed(self._why)

    def stop(self, why: str = "") -> None:
        pass


def served(folder: Path, version: int) -> ServedModel:
    """A model that would be run by a process, which nobody calls."""
    blobs = DiskBlobStore(folder / "blobs")
    digests = (
        blobs.put(matrix_product()),
        blobs.put(encode_arrays({"w": np.full((3, 2), version, np.float32)})),
    )
    workers = Workers(folder / "blobs", num_threads=1, providers=("CPUExecutionProvider",))
    return ServedModel(version, 0, workers.model(*digests, (3,)))


def cache_in(folder: Path) -> EngineCache:
    return EngineCache(folder / "engines", PaperMaker().platform())


def engine_of(folder: Path, model: ServedModel) -> Path | None:
    assert isinstance(model.model, WorkerModel)
    job = model.model.job
    return cache_in(folder).find(artefact_digest(job.graph, job.parameters), BatchProfile())


class Bench:
    """A desk with everything around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.slot = Slot()
        self.now = 100.0
        self._desks: list[EngineDesk] = []

    def desk(self, maker: str = "PaperMaker", new_build: Any = None) -> EngineDesk:
        builds = new_build or (lambda: EngineBuild(f"{PAPER}:{maker}"))
        slot: Any = self.slot
        self._desks.append(EngineDesk(slot, cache_in(self.folder), PaperMaker(), builds, clock=lambda: self.now))
        return self._desks[-1]

    def close(self) -> None:
        for desk in self._desks:
            desk.stop()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_the_served_model_gets_an_engine_and_operators_see_how_far_it_is(bench: Bench):
    desk = bench.desk("WaitingMaker")
    assert desk.state == ""
    model = served(bench.folder, 1)
    desk.want(model)
    until(lambda: desk.state.startswith("building engine 3/11"))
    bench.now += 42.3
    assert desk.state == "building engine 3/11, 42 s"
    assert bench.slot.upgrades == []
    (bench.folder / "go").touch()
    until(lambda: bench.slot.upgrades)
    until(lambda: desk.state == "engine serves")
    version, faster = bench.slot.upgrades[0]
    assert version == 1
    assert faster is not model.model
    assert faster.job.providers == ("CPUExecutionProvider",)  # what paper engines answer with
    assert engine_of(bench.folder, model) is not None


def test_after_a_restart_the_engine_comes_from_the_cache(bench: Bench):
    first = bench.desk()
    first.want(served(bench.folder, 1))
    until(lambda: bench.slot.upgrades)
    first.stop()
    again = bench.desk(new_build=lambda: Refuses("nothing should be built"))
    again.want(served(bench.folder, 1))
    until(lambda: len(bench.slot.upgrades) == 2)


def test_on_a_disk_that_takes_nothing_the_engine_that_is_there_serves(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """The desk's thread ended as it couldn't delete what is of no use, and nothing ever got an engine."""
    first = bench.desk()
    first.want(served(bench.folder, 1))
    until(lambda: bench.slot.upgrades)
    first.stop()
    (bench.folder / "engines" / "of no use").mkdir()

    def read_only(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", read_only)
    monkeypatch.setattr(cache.os, "utime", read_only)
    again = bench.desk(new_build=lambda: Refuses("nothing should be built"))
    again.want(served(bench.folder, 1))
    until(lambda: len(bench.slot.upgrades) == 2 or again.state or not again._thread.is_alive())
    assert len(bench.slot.upgrades) == 2


def test_a_newer_model_stops_the_build_of_an_older_one(bench: Bench):
    desk = bench.desk("WaitingMaker")
    old, new = served(bench.folder, 1), served(bench.folder, 2)
    desk.want(old)
    until((bench.folder / "builder").exists)
    (bench.folder / "builder").unlink()
    bench.slot.active_version = 2
    desk.want(new)
    until((bench.folder / "builder").exists)  # the newer one's
    (bench.folder / "go").touch()
    until(lambda: bench.slot.upgrades)
    assert [version for version, _ in bench.slot.upgrades] == [2]
    assert engine_of(bench.folder, old) is None
    assert "no engine" not in desk.state


def test_an_engine_of_a_model_that_serves_no_more_is_kept_but_not_served(bench: Bench):
    desk = bench.desk()
    model = served(bench.folder, 1)
    bench.slot.active_version = 7
    desk.want(model)
    until(lambda: desk.state == "" and engine_of(bench.folder, model) is not None)
    assert bench.slot.upgrades == []


def test_a_failed_build_is_said_once_and_serving_goes_on_without(bench: Bench, caplog: pytest.LogCaptureFixture):
    desk = bench.desk("FailingMaker")
    with caplog.at_level(logging.WARNING):
        for version in (1, 2):
            desk.want(served(bench.folder, version))
            until(lambda: desk.state == "no engine: RuntimeError: no paper left")
            until(lambda: not any((bench.folder / "engines").glob(".building-*")))
    assert [record.message for record in caplog.records] == ["no engine"]
    assert bench.slot.upgrades == []


def test_after_some_failures_in_a_row_nothing_is_built_any_more(bench: Bench, caplog: pytest.LogCaptureFixture):
    Refuses.made = 0
    desk = bench.desk(new_build=lambda: Refuses(f"reason {Refuses.made}"))
    with caplog.at_level(logging.WARNING):
        for version in range(1, GIVE_UP_AFTER + 3):
            desk.want(served(bench.folder, version))
            until(lambda number=version: Refuses.made >= number and not desk._wanted)
            time.sleep(0.05)
    messages = [record.message for record in caplog.records]
    assert messages == ["no engine"] * (GIVE_UP_AFTER - 1) + ["no more engines are built"]


def test_a_client_that_stops_doesnt_wait_for_a_build(bench: Bench):
    desk = bench.desk("WaitingMaker")
    desk.want(served(bench.folder, 1))
    until((bench.folder / "builder").exists)
    began = time.monotonic()
    desk.stop()
    assert time.monotonic() - began < 30
    assert list((bench.folder / "engines").iterdir()) == []


def test_models_that_no_process_runs_are_left_alone(bench: Bench):
    desk = bench.desk(new_build=lambda: Refuses("nothing should be built"))
    desk.want(ServedModel(1, 0, lambda images: images))
    desk.want(ServedModel(1, 0, lambda images: images))
    desk.stop()
    assert desk.state == ""
