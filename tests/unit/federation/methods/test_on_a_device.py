"""Every method on a device that isn't the CPU, and refuses what a GPU refuses: the CPU's results, to the bit."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
import torch

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS, lockstep
from replayfleet.federation.methods.kit.late import drawn_back
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.placement import CPU, placed, placed_data, proved_device
from replayfleet.federation.methods.kit.records import Artefacts, RoundData
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.lockstep import together
from replayfleet.federation.methods.steps import averaging, memory
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.simulator.settings import method_from
from tests.support.shapes import SHAPES, shape_pictures
from tests.support.toy import TOY, toy_data
from tests.support.virtual_device import DEVICE, NAME, virtual_device

QUICK = {
    "local_epochs": 1,
    "batch_size": 6,
    "sub_generator_epochs": 1,
    "first_sub_generator_epochs": 1,
    "gan_batch_size": 6,
    "replay_per_client": 8,
    "aggregation_epochs": 1,
    "gate_samples": 8,
    "max_tries_factor": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "pfedgrp by the median": {"robust": "median"},
    "pfedgrp with Gaussians": {"sub_generator": "pca-mixture"},
    "pfedgrp with DP-SGD": {"dp_noise_multiplier": 1.0},
    "fedgp over DER": {"base": "der"},
}
DETECTORS = ("der", "fedavg", "ideal")
IN_STEP = ("fedavg", "pfedgrp")


@pytest.fixture(autouse=True)
def _sub_generators_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sub-generators train as one network, as on a GPU; a CPU trains them one by one, which rounds otherwise."""
    train_all = memory.train_all
    monkeypatch.setattr(lockstep, "train_all", lambda kind, work: train_all(kind, work, as_one=True))


def method_named(name: str, task: Any = TOY) -> Any:
    kind = METHODS[name.split()[0]]
    quick = {key: value for key, value in QUICK.items() if key in inspect.signature(kind).parameters}
    changes = {key: str(value) for key, value in (quick | SETTINGS.get(name, {})).items()}
    return method_from(kind, task, "tiny", changes)


def rounds_on(device: torch.device, method: Any, data: list[RoundData], *, in_step: bool = False) -> list[Artefacts]:
    """Return everything that two clients and an aggregator held in two rounds, all of it computed on ``device``.

    In the second one of them is late.
    """
    client, aggregator = (placed(one, device) for one in method.initial_states())
    initial = placed(method.initial_download(seeded_generator(0, 0, "initial")), device)
    clients, downloads = dict.fromkeys("ab", client), dict.fromkeys("ab", initial)
    held: list[Artefacts] = []
    for index in range(2):
        local_round = method.local_work if in_step else method.local_round  # of the same arguments
        made = {
            name: local_round(
                clients[name],
                placed_data(data[2 * index + place], device),
                downloads[name],
                seeded_generator(0, index, name),
                sampler=sampler_of(method),
            )
            for place, name in enumerate(clients)
        }
        made = together(made) if in_step else made
        clients = {name: state for name, (state, _) in made.items()}
        uploads = {name: upload for name, (_, upload) in made.items()}
        uploads["b"] = drawn_back(method, uploads["b"], downloads["b"], index) if index else uploads["b"]
        rng = seeded_generator(0, index, "aggregator")
        aggregator, given = method.aggregate(aggregator, uploads, rng, sampler=sampler_of(method))
        downloads = {name: given[name] for name in clients}
        held += [one.pack() for one in (*clients.values(), *uploads.values(), aggregator, *downloads.values())]
    answers = method.predictor(downloads["a"])(placed_data(data[0], device).images)
    held.append(Artefacts({"answers": {"": answers}}, {}))
    for one in held:
        assert {tensor.device for each in one.parameter_sets.values() for tensor in each.values()} <= {device}
    return held


def there_as_here(method: Any, data: list[RoundData], **how: Any) -> None:
    with virtual_device():
        there = [on_the_cpu(one) for one in rounds_on(DEVICE, method, data, **how)]
    here = rounds_on(CPU, method, data, **how)
    assert len(there) == len(here)
    for one, other in zip(there, here, strict=True):
        assert one.facts == other.facts
        assert one.parameter_sets.keys() == other.parameter_sets.keys()
        assert all(same_bits(one.parameter_sets[name], other.parameter_sets[name]) for name in one.parameter_sets)


def on_the_cpu(one: Artefacts) -> Artefacts:
    sets = {name: {key: tensor.cpu() for key, tensor in each.items()} for name, each in one.parameter_sets.items()}
    return Artefacts(sets, one.facts)


@pytest.mark.parametrize("name", [*METHODS, *(name for name in SETTINGS if name not in METHODS)])
def test_a_method_computes_on_a_device_what_it_computes_on_the_cpu(name: str) -> None:
    if "DP-SGD" in name:
        pytest.importorskip("opacus")
    there_as_here(method_named(name), [toy_data({c: 6, c + 1: 5}, seed=c) for c in (0, 1, 2, 0)])


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
