"""Every method on a device that isn't the CPU, and refuses what a GPU refuses: the CPU's results, to the bit."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS, lockstep, pfedgrp
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.placement import CPU, proved_device
from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.methods.steps import averaging, memory
from replayfleet.federation.methods.steps.personalisation.mixtures import personalise_all
from replayfleet.federation.simulator.settings import method_from
from tests.support.method_rounds import VARIANTS, method_named, on_the_cpu, rounds_on, toy_rounds
from tests.support.shapes import SHAPES, shape_pictures
from tests.support.toy import TOY, toy_data
from tests.support.virtual_device import DEVICE, NAME, virtual_device

DETECTORS = ("der", "fedavg", "ideal")
IN_STEP = ("fedavg", "pfedgrp")


@pytest.fixture(autouse=True)
def _as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sub-generators train as one and Eq. 3 is solved at once, as on a GPU; a CPU's one by one rounds otherwise."""
    train_all = memory.train_all
    monkeypatch.setattr(pfedgrp, "personalise_all", functools.partial(personalise_all, together=True))
    monkeypatch.setattr(lockstep, "train_all", lambda kind, work: train_all(kind, work, as_one=True))


def there_as_here(method: Any, data: list[RoundData], **how: Any) -> None:
    with virtual_device():
        there = [on_the_cpu(one) for one in rounds_on(DEVICE, method, data, **how)]
    here = rounds_on(CPU, method, data, **how)
    assert len(there) == len(here)
    for one, other in zip(there, here, strict=True):
        assert one.facts == other.facts
        assert one.parameter_sets.keys() == other.parameter_sets.keys()
        assert all(same_bits(one.parameter_sets[name], other.parameter_sets[name]) for name in one.parameter_sets)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_method_computes_on_a_device_what_it_computes_on_the_cpu(name: str) -> None:
    if "DP-SGD" in name:
        pytest.importorskip("opacus")
    there_as_here(method_named(name), toy_rounds())


@pytest.mark.parametrize("name", DETECTORS)
def test_a_method_learns_boxes_on_a_device_too(name: str) -> None:
    there_as_here(method_named(name, SHAPES), [shape_pictures(4, seed=seed) for seed in range(4)])


@pytest.mark.parametrize("name", IN_STEP)
def test_clients_in_step_compute_on_a_device_what_they_compute_on_the_cpu(name: str) -> None:
    there_as_here(method_named(name), [toy_data({c: 6, c + 1: 6}, seed=c) for c in (0, 1, 2, 0)], in_step=True)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="needs replayfleet[ddpm]")
def test_diffusion_models_train_where_their_images_are() -> None:
    settings = {"sub_generator": "ddpm"}
    with virtual_device():
        rounds_on(DEVICE, method_from(METHODS["pfedgrp"], TOY, "tiny", settings), [toy_data({0: 4})] * 4)


@pytest.mark.parametrize("planted", [lambda n: torch.zeros(n), lambda n: torch.ones(n) / n])
def test_a_tensor_without_a_device_is_found(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weigh = averaging._add_weighted
    monkeypatch.setattr(
        averaging, "_add_weighted", lambda total, tensors, shares: weigh(total.add_(planted(1)), tensors, shares)
    )
    with virtual_device(), pytest.raises(RuntimeError, match=f"same device, found cpu and {NAME}"):
        rounds_on(DEVICE, method_named("fedavg"), [toy_data({0: 6, 1: 6})] * 4)


def test_random_numbers_come_from_the_cpu_alone() -> None:
    with virtual_device(), pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, generator=torch.Generator(), device=DEVICE)


def test_auto_is_a_device_that_computes_what_the_cpu_does_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with virtual_device():
        assert proved_device("auto", ["cuda:99", NAME]) == (DEVICE, "")
        assert proved_device(NAME) == (DEVICE, "")
        device, why = proved_device("auto", ["cuda:99"])
    assert device == CPU
    assert "cuda:99" in why
    with pytest.raises(SettingsError, match="can't be used"):
        proved_device(NAME)  # nobody has it here
    with virtual_device():
        wrong = torch.nn.functional.batch_norm
        monkeypatch.setattr(
            torch.nn.functional,
            "batch_norm",
            lambda maps, *how, **why: wrong(maps, *how, **why) + (maps.device == DEVICE),
        )
        assert proved_device("auto", [NAME])[0] == CPU
        with pytest.raises(SettingsError, match="computes other numbers than the CPU"):
            proved_device(NAME)
