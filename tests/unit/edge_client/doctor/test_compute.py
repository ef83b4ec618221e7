from __future__ import annotations

import sys

import pytest

from replayfleet.devices import providers
from replayfleet.devices.probing import Board
from replayfleet.devices.profiles import CPU, CUDA, TENSORRT, profile
from replayfleet.devices.providers import Trial
from replayfleet.edge_client.doctor.board import look_at_provider
from replayfleet.edge_client.doctor.findings import Status

PC = Board(machine="x86_64", num_cores=8)
LACKING = Trial(CUDA, "listed, but not usable: libcublasLt.so.13 can't be found", missing=("libcublasLt.so.13",))


def test_the_cpu_is_proved() -> None:
    (found,) = look_at_provider("cpu", CPU, profile("cpu"), PC)
    assert (found.check, found.status) == ("provider.cpu", Status.OK)
    assert found.facts == {"listed": True, "works": True, "missing": [], "wanted": True}


@pytest.mark.parametrize(
    ("device", "require", "trial", "status"),
    [
        ("cpu", "", LACKING, Status.WARNING),
        ("cuda", "", LACKING, Status.FAILURE),
        ("cpu", "cuda", LACKING, Status.FAILURE),
        ("cuda", "cpu", LACKING, Status.WARNING),
        ("cpu", "", Trial(CUDA, "not built in", listed=False), Status.SKIPPED),
        ("cuda", "", Trial(CUDA, "not built in", listed=False), Status.FAILURE),
        ("cpu", "", Trial(CUDA), Status.OK),
        ("cuda", "", Trial(CUDA), Status.OK),
    ],
)
def test_how_much_a_missing_provider_matters_depends_on_who_wants_it(
    device: str, require: str, trial: Trial, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "try_provider", lambda provider: trial)
    (found,) = look_at_provider("cuda", CUDA, profile(device), PC, require)
    assert found.status == status
    assert bool(found.advice) == (status in {Status.WARNING, Status.FAILURE})
    if trial is LACKING:
        assert "libcublasLt.so.13" in found.found
        assert found.facts["missing"] == ["libcublasLt.so.13"]


def test_tensorrt_is_missed_only_where_engines_are_worth_building(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "try_provider", lambda provider: Trial(provider, "not built in", listed=False))
    assert look_at_provider("tensorrt", TENSORRT, profile("jetson-thor"), PC)[0].status == Status.WARNING
    assert look_at_provider("tensorrt", TENSORRT, profile("jetson-orin-nano"), PC)[0].status == Status.SKIPPED


def test_without_onnxruntime_only_what_is_needed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert look_at_provider("cpu", CPU, profile("cpu"), PC)[0].status == Status.FAILURE
    assert look_at_provider("cuda", CUDA, profile("cpu"), PC)[0].status == Status.SKIPPED
