"""Work for clients on a real Ray cluster of two workers, on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.each import spread_by
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.service.engine import RayEngine, check_engine
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
    engine = RayEngine("ray", num_threads=1, num_workers=2)
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


def test_when_the_whole_cluster_is_gone_the_work_is_done_here(caplog: pytest.LogCaptureFixture) -> None:
    engine = RayEngine.__new__(RayEngine)
    import ray

    engine._ray, engine._num_threads, engine._size = ray, 1, 2

    class Gone:
        def remote(self, *_: Any) -> Any:
            raise ray.exceptions.RayActorError

    engine._task = Gone()
    ray_put, ray.put = ray.put, lambda value: value
    try:
        done = engine.map(trained, range(2))
    finally:
        ray.put = ray_put
    assert [pid for pid, _ in done] == [os.getpid()] * 2
    assert "done in this process" in caplog.text


@pytest.mark.parametrize("text", ["dask", "ray:/1.2.3.4", "ray://1.2.3.4", "there"])
def test_an_engine_that_isnt_known_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="expected here, ray"):
        check_engine(text)
