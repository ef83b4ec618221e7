"""Work for clients on real Ray clusters, on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.each import spread_by
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.service.cluster import driver
from replayfleet.federation.service.cluster import engine as engine_module
from replayfleet.federation.service.cluster.engine import RayEngine, check_engine
from replayfleet.federation.service.torch_setup import prepare_torch

pytest.importorskip("ray")
on_a_cluster = pytest.mark.slow  # it takes a while to start
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayEngine]:
    engine = RayEngine("ray", num_threads=1, num_workers=2, start_s=None)
    yield engine
    engine.close()


def trained(seed: int) -> tuple[int, torch.Tensor]:
    """A few steps of a convolution, and who did them."""
    prepare_torch(1)
    rng = torch.Generator().manual_seed(seed)
    weights = torch.randn(8, 3, 3, 3, generator=rng, requires_grad=True)
    images = torch.randn(16, 3, 12, 12, generator=rng)
    for _ in range(5):
        loss = torch.nn.functional.conv2d(images, weights).relu().square().mean()
        (gradient,) = torch.autograd.grad(loss, weights)
        weights = (weights - 0.1 * gradient).detach().requires_grad_()
    return os.getpid(), weights.detach()


@on_a_cluster
def test_items_come_back_in_order_with_the_bits_of_this_process(cluster: RayEngine) -> None:
    done = cluster.map(trained, range(6))
    assert os.getpid() not in {pid for pid, _ in done}
    assert all(torch.equal(found, trained(seed)[1]) for seed, (_, found) in enumerate(done))


@on_a_cluster
def test_an_error_of_the_work_itself_comes_out_as_it_is(cluster: RayEngine) -> None:
    def refuse(item: int) -> int:
        if item == 2:
            raise ValueError("not this one")
        return item

    with pytest.raises(ValueError, match="not this one"):
        cluster.map(refuse, range(4))


@on_a_cluster
def test_a_worker_that_is_killed_costs_time_only(cluster: RayEngine, tmp_path: Path) -> None:
    def once_killed(seed: int) -> torch.Tensor:
        mark = tmp_path / str(seed)
        if seed in {1, 2} and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return trained(seed)[1]

    done = cluster.map(once_killed, range(4))
    assert all(torch.equal(found, trained(seed)[1]) for seed, found in enumerate(done))
    assert len(list(tmp_path.iterdir())) == 2


@on_a_cluster
def test_eq_3_on_the_cluster_gives_the_same_bits_also_when_workers_die_in_the_middle_of_it(
    cluster: RayEngine, tmp_path: Path
) -> None:
    method, state, uploads = a_round()

    def aggregated() -> Any:
        prepare_torch(1)
        rng = torch.Generator().manual_seed(7)
        return method.aggregate(state, uploads, rng, sampler=sampler_of(method))[1]

    here = aggregated()

    def deadly(function: Any, items: Any) -> Any:
        def sometimes(item: Any) -> Any:
            mark = tmp_path / f"{len(list(tmp_path.iterdir()))}"
            if len(list(tmp_path.iterdir())) < 2:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(item)

        return cluster.map(sometimes, items)

    with spread_by(deadly):
        there = aggregated()
    assert list(tmp_path.iterdir())
    assert there.keys() == here.keys() == uploads.keys()
    for name, download in here.items():
        assert there[name].weights == download.weights
        assert same_bits(there[name].personalised, download.personalised)
        assert len(set(download.weights.values())) > 1  # Eq. 3 was solved


def a_round() -> tuple[Any, Any, dict[str, Any]]:
    """Three clients' uploads to pFedGRP, each with a sub-generator."""
    from replayfleet.models.build import build_task_model, initialise
    from replayfleet.models.specs import TaskSpec

    task = TaskSpec(1, 28, ("a", "b", "c"), "cifar", 4)
    method = METHODS["pfedgrp"](task=task, replay_per_client=16, aggregation_epochs=2, filter_replay=False)
    uploads = {}
    for place in range(3):
        rng = torch.Generator().manual_seed(place)
        model = initialise(build_task_model(task), rng).state_dict()
        layout = method.upload_layout(f"sub-generator/{place}")
        generator = {
            key: torch.rand(one.shape, generator=rng).to(one.dtype) * 0.1 + 0.01
            if one.is_floating_point()
            else torch.ones(one.shape, dtype=one.dtype)
            for key, one in layout.items()
        }
        uploads[f"cam-{place}"] = method.Upload(model, {place: generator}, {place: 10}, 10)
    return method, method.initial_states()[1], uploads


def items(then: Callable[[], None]) -> Iterator[int]:
    """Seeds, the last of which come after ``then``; a cluster of two workers has answered four of them by then."""
    yield from range(8)
    then()
    yield from range(8, 12)


def check_that_both_did_it(done: list[tuple[int, torch.Tensor]]) -> None:
    assert all(torch.equal(found, trained(seed)[1]) for seed, (_, found) in enumerate(done))
    assert len(done) == 12
    assert {os.getpid()} < {pid for pid, _ in done}


def until_used(engine: RayEngine) -> None:
    while os.getpid() in {pid for pid, _ in engine.map(trained, range(2))}:
        time.sleep(0.5)


@on_a_cluster
def test_without_its_raylet_the_work_is_done_here_and_then_on_another_cluster(
    cluster: RayEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def kill_the_raylet() -> None:
        (raylet,) = (one for one in psutil.Process().children(recursive=True) if one.name() == "raylet")
        raylet.kill()

    check_that_both_did_it(cluster.map(trained, items(kill_the_raylet)))
    until_used(cluster)  # Ray ends what drove the old one, and not us
    assert "no Ray cluster engine=ray" in caplog.text


@contextlib.contextmanager
def head(port: int, num_workers: int = 2) -> Iterator[Callable[[], None]]:
    """Run a cluster that others reach at ``port``; yields what kills it."""
    settings = (
        f"--head --block --node-ip-address=127.0.0.2 --port=0 --ray-client-server-port={port} --num-cpus={num_workers}"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", *settings.split(), "--include-dashboard=false"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )

    def kill() -> None:
        for one in psutil.Process().children(recursive=True):
            if process.pid in {one.pid, *(parent.pid for parent in one.parents())}:
                one.kill()
        process.wait()

    try:
        yield kill
    finally:
        if process.poll() is None:
            kill()


@pytest.fixture
def a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of this test, and as long as Ray wants it")


@on_a_cluster
@pytest.mark.usefixtures("a_token")
def test_a_cluster_without_workers_holds_nobody(caplog: pytest.LogCaptureFixture) -> None:
    address = f"ray://127.0.0.2:{(port := closed_port())}"
    with head(port, 0), contextlib.closing(RayEngine(address, 1, again_s=0.2, silence_s=2.0)) as engine:
        while not engine._size:
            assert [pid for pid, _ in engine.map(trained, range(3))] == 3 * [os.getpid()]
            time.sleep(0.5)
        assert [pid for pid, _ in engine.map(trained, range(3))] == 3 * [os.getpid()]
    assert "the Ray cluster is silent" in caplog.text


@on_a_cluster
@pytest.mark.usefixtures("a_token")
def test_a_cluster_elsewhere_may_be_away_at_the_start_come_go_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "1")
    with contextlib.closing(RayEngine(f"ray://127.0.0.2:{(port := closed_port())}", 1, again_s=0.2)) as engine:
        assert {pid for pid, _ in engine.map(trained, range(2))} == {os.getpid()}
        with head(port) as kill:
            until_used(engine)
            check_that_both_did_it(engine.map(trained, items(kill)))
        with head(port):
            until_used(engine)


def closed_port() -> int:
    with socket.create_server(("127.0.0.2", 0)) as server:
        return int(server.getsockname()[1])


def test_a_cluster_that_is_there_and_takes_nobody_is_told_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("ray client connection timeout")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    with socket.create_server(("127.0.0.2", 0)) as server, pytest.raises(ConnectionError, match="RAY_AUTH_TOKEN"):
        driver._cluster(f"ray://127.0.0.2:{server.getsockname()[1]}", None)


def test_while_there_is_no_cluster_the_work_is_done_here(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(RayEngine(f"ray://127.0.0.2:{closed_port()}", 1, again_s=0, start_s=None)) as engine:
        for _ in range(2):
            assert engine.map(lambda item: (os.getpid(), item), range(2)) == [(os.getpid(), 0), (os.getpid(), 1)]
    (said,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "Connection refused" in said, "and once is enough"
    assert "done in this process until there is one" in said


def test_a_driver_that_ends_after_its_first_task_leaves_the_others_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    brief = """import sys, ray.cloudpickle as pickled
from multiprocessing.connection import Connection
parent = Connection(int(sys.argv[1]))
parent.send(2)
function = pickled.loads(parent.recv())
number, item = parent.recv()
parent.send((number, pickled.dumps(function(pickled.loads(item)))))"""
    monkeypatch.setattr(engine_module, "child_command", lambda _, fd, *__, **___: (sys.executable, "-c", brief, fd))
    with contextlib.closing(RayEngine("ray", 1, start_s=None)) as engine:
        done = engine.map(lambda item: (os.getpid(), item), range(12))
    assert [item for _, item in done] == list(range(12))
    assert [pid == os.getpid() for pid, _ in done] == [False] + 11 * [True]


SILENT = """import sys, ray.cloudpickle as pickled
from multiprocessing.connection import Connection
from pathlib import Path
parent = Connection(int(sys.argv[1]))
parent.send(2)
late = []
while (said := parent.recv()) is not None:
    if isinstance(said, bytes):
        function = pickled.loads(said)
        continue
    late.append(said)
    if len(late) == 4:
        for number, item in late:
            parent.send((number, pickled.dumps(function(pickled.loads(item)))))
    if len(late) > 4:
        parent.send((said[0], pickled.dumps(function(pickled.loads(said[1])))))"""
"""A driver whose cluster does nothing before it has four tasks."""

STUCK = """import sys, ray.cloudpickle as pickled
from multiprocessing.connection import Connection
parent = Connection(int(sys.argv[1]))
parent.send(2)
while (said := parent.recv()) is not None:
    if isinstance(said, bytes):
        function = pickled.loads(said)
        continue
    number, item = said
    if not (number == 0):
        parent.send((number, pickled.dumps(function(pickled.loads(item)))))"""
"""A driver whose first task never ends."""

LONG = """import sys, time, ray.cloudpickle as pickled
from multiprocessing.connection import Connection
parent = Connection(int(sys.argv[1]))
parent.send(2)
begun = []
while (said := parent.recv()) is not None:
    if isinstance(said, bytes):
        function = pickled.loads(said)
        continue
    begun.append(said)
    _, folder = pickled.loads(said[1])
    if len(begun) < 5:
        continue
    while not (folder / "silent").exists():
        time.sleep(0.01)
    for number, item in begun if len(begun) == 5 else [said]:
        parent.send((number, pickled.dumps(function(pickled.loads(item)))))
        (folder / "answered").touch()
        time.sleep(0.5 * (number == 0))"""
"""A driver whose first five tasks end one after another; the first, which we do too, while we do it."""

FROZEN = """import os, signal, sys
from multiprocessing.connection import Connection
parent = Connection(int(sys.argv[1]))
parent.send(2)
os.kill(os.getpid(), signal.SIGSTOP)"""


def who_and(item: int) -> tuple[int, int]:
    return os.getpid(), item


def driven_by(code: str, monkeypatch: pytest.MonkeyPatch, silence_s: float) -> RayEngine:
    monkeypatch.setattr(engine_module, "child_command", lambda _, fd, *__, **___: (sys.executable, "-c", code, fd))
    monkeypatch.setattr(engine_module, "GOODBYE_S", 0)
    return RayEngine("ray", 1, start_s=None, silence_s=silence_s)


def test_a_cluster_that_says_nothing_is_used_again_when_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(driven_by(SILENT, monkeypatch, 0.2)) as engine:
        assert engine.map(who_and, range(3)) == [(os.getpid(), item) for item in range(3)]
        assert [record.getMessage()[:26] for record in caplog.records] == ["the Ray cluster is silent "]
        monkeypatch.setattr(engine, "_silence_s", 60.0)  # a fourth one is asked for, and it answers all
        done = engine.map(who_and, range(3))
    assert [item for _, item in done] == [0, 1, 2]
    assert os.getpid() not in {pid for pid, _ in done}


def who_takes_long(item: tuple[int, Path]) -> int:
    """Of us, until the cluster has answered."""
    pid, folder = item
    (folder / "silent").touch()
    end = time.monotonic() + 60
    while os.getpid() == pid and not (folder / "answered").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    return os.getpid()


def test_a_cluster_whose_tasks_are_long_is_given_more_once_it_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with contextlib.closing(driven_by(LONG, monkeypatch, 0.2)) as engine:
        monkeypatch.setattr(engine_module.log, "warning", lambda *_: setattr(engine, "_silence_s", 60.0))
        done = engine.map(who_takes_long, [(os.getpid(), tmp_path)] * 12)
    assert [pid == os.getpid() for pid in done] == [True] + 11 * [False]


def test_a_task_that_never_answers_keeps_no_other_from_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(driven_by(STUCK, monkeypatch, 0.2)) as engine:
        assert engine.map(who_and, [0]) == [(os.getpid(), 0)]
        monkeypatch.setattr(engine, "_silence_s", 60.0)
        for _ in range(2):
            done = engine.map(who_and, range(7))
            assert [item for _, item in done] == list(range(7))
            assert os.getpid() not in {pid for pid, _ in done}


def test_a_cluster_that_never_answers_is_given_no_more_than_it_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(driven_by(STUCK.replace("number == 0", "True"), monkeypatch, 0.2)) as engine:
        for _ in range(4):
            assert engine.map(who_and, range(3)) == [(os.getpid(), item) for item in range(3)]
        assert len(engine._open) == 5
        monkeypatch.setattr(engine, "_silence_s", 3600.0)  # and is waited for no more
        assert engine.map(who_and, range(3)) == [(os.getpid(), item) for item in range(3)]
    assert len(caplog.records) == 1


def test_a_driver_that_is_frozen_is_ended_and_holds_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(driven_by(FROZEN, monkeypatch, 0.2)) as engine:
        frozen = engine._driver.pid
        items = [item * bytes(1_000_000) for item in range(12)]  # more than a pipe holds
        assert engine.map(len, items) == [1_000_000 * item for item in range(12)]
        assert not psutil.pid_exists(frozen)
    assert "its process is frozen" in caplog.text


@pytest.mark.parametrize("text", ["dask", "ray:/1.2.3.4", "ray://1.2.3.4", "ray://1.2.3.4:65536", "there"])
def test_an_engine_that_isnt_known_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="expected here, ray"):
        check_engine(text)


def test_a_ray_that_cannot_be_imported_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.py").write_text("raise TypeError('Descriptors cannot be created directly')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SettingsError, match=r"engine ray: Ray can't be imported \(TypeError: Descriptors"):
        RayEngine("ray", 1)
