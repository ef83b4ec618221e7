"""LwF, FLwF-2T, EWC and FedProx+: what begins a task, what is remembered of the one before, and how it holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from replayfleet.federation.methods.ewc import EWC, Consolidated, held_back
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.lwf import LwF, Past
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec
from tests.support.toy import TOY, run_rounds, toy_data

QUICK: dict[str, Any] = {"local_epochs": 4, "batch_size": 8, "learning_rate": 0.02, "weight_decay": 0.0}
LONGER: dict[str, Any] = {**QUICK, "local_epochs": 20, "learning_rate": 0.05, "momentum": 0.0}
SMALL = replace(TOY, architecture="lenet")  # no BatchNorm, whose statistics lag behind a few steps
TASKS = [{"a": {0: 8, 1: 8}}, {"a": {0: 8, 1: 8}}, {"a": {2: 8, 3: 8}}]


def model(seed: int = 0, task: TaskSpec = TOY) -> dict[str, torch.Tensor]:
    return dict(initialise(build_task_model(task), torch.Generator().manual_seed(seed)).state_dict())


def local_round(method: Any, state: Any, counts: dict[int, int], start: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    rng = seeded_generator(0, 0, "a")
    return method.local_round(state, toy_data(counts), TaskDownload(start), rng, sampler=eager_sampler(TOY))


@pytest.mark.parametrize("kind", [LwF, EWC])
def test_the_first_task_is_fedavg_to_the_bit_and_a_new_class_ends_it(kind: type[Any]) -> None:
    _, ours = run_rounds(kind(task=TOY, **QUICK), TASKS[:2])
    _, fedavg = run_rounds(FedAvg(task=TOY, **QUICK), TASKS[:2])
    assert same_bits(ours["a"].task_parameters, fedavg["a"].task_parameters)
    _, ours = run_rounds(kind(task=TOY, **QUICK), TASKS)
    _, fedavg = run_rounds(FedAvg(task=TOY, **QUICK), TASKS)
    assert not same_bits(ours["a"].task_parameters, fedavg["a"].task_parameters)


def test_a_client_remembers_its_own_model_of_the_task_before() -> None:
    method = LwF(task=TOY, **QUICK)
    state, first = local_round(method, Past(), {0: 8, 1: 8}, model())
    state, second = local_round(method, state, {0: 8}, first.task_parameters)
    assert (state.met, state.old, state.past) == ((0, 1), (), {})
    state, third = local_round(method, Past.unpack(state.pack()), {1: 4, 2: 8}, model(5))
    assert (state.met, state.old) == ((0, 1, 2), (0, 1))
    assert same_bits(state.past, second.task_parameters)
    assert same_bits(state.own, third.task_parameters)
    assert isinstance(third, TaskUpload)
    state, _ = local_round(method, state, {2: 8}, third.task_parameters)
    assert same_bits(state.past, second.task_parameters)  # still the task before


@pytest.mark.parametrize("teacher", ["past_weight", "server_weight"])
def test_each_teacher_holds_what_it_says_of_old_classes(teacher: str) -> None:
    weights = {"past_weight": 0.0, "server_weight": 0.0}
    state, _ = local_round(LwF(task=SMALL, **LONGER), Past(), {0: 8, 1: 8}, model(task=SMALL))
    start = model(3, SMALL)
    images = toy_data({2: 8, 3: 8}).images
    taught = {"past_weight": state.own, "server_weight": start}[teacher]
    said = judge_with(SMALL, taught)(images)[:, :2].softmax(dim=1)
    distance = {}
    for weight in (0.0, 3.0):
        method = LwF(task=SMALL, **LONGER, **{**weights, teacher: weight})
        _, upload = local_round(method, state, {2: 8, 3: 8}, start)
        answers = judge_with(SMALL, upload.task_parameters)(images)[:, :2].softmax(dim=1)
        distance[weight] = float((answers - said).abs().mean())
    assert distance[3.0] < distance[0.0]


def test_ewc_holds_each_parameter_by_its_information() -> None:
    layer = nn.Linear(2, 1, bias=False)
    anchor, fisher = {"weight": torch.zeros(1, 2)}, {"weight": torch.tensor([[4.0, 0.0]])}
    expected = 2 * layer.weight[0, 0] ** 2
    torch.testing.assert_close(held_back(layer, anchor, fisher), expected)
    torch.testing.assert_close(held_back(layer, anchor, {}), layer.weight.square().sum() / 2)


def test_what_a_task_needed_is_added_up_at_its_end_and_the_anchor_is_the_fleets_model() -> None:
    method = EWC(task=TOY, **QUICK, fisher_cap=1e9)
    state, _ = local_round(method, Consolidated(), {0: 8, 1: 8}, model())
    assert (state.anchor, state.fisher) == ({}, {})
    first = state.latest
    state, _ = local_round(method, Consolidated.unpack(state.pack()), {2: 8}, model(1))
    assert same_bits(state.anchor, model(1))
    assert same_bits(state.fisher, first)
    second = state.latest
    state, _ = local_round(method, state, {3: 8}, model(2))
    torch.testing.assert_close(state.fisher["head.bias"], first["head.bias"] + second["head.bias"])
    assert same_bits(state.anchor, model(2))
    capped = EWC(task=TOY, **QUICK, fisher_cap=1e-9)
    state, _ = local_round(capped, Consolidated(), {0: 8, 1: 8}, model())
    assert max(float(tensor.max()) for tensor in state.latest.values()) <= 1e-9


@pytest.mark.parametrize(("weighting", "strong"), [("fisher", 5e4), ("even", 10.0)])
def test_the_penalty_reaches_the_model_that_is_optimised(weighting: str, strong: float) -> None:
    moved = {}
    for importance in (0.0, strong):
        method = EWC(task=SMALL, **LONGER, weighting=weighting, importance=importance, fisher_cap=9.0)
        state, _ = local_round(method, Consolidated(), {0: 8, 1: 8}, model(task=SMALL))
        assert bool(state.latest) == (weighting == "fisher")
        _, upload = local_round(method, state, {2: 8, 3: 8}, model(1, SMALL))
        module = build_task_model(SMALL)
        module.load_state_dict(upload.task_parameters)
        moved[importance] = float(held_back(module, model(1, SMALL), state.latest).detach())
    assert moved[strong] < 0.9 * moved[0.0]


def test_impossible_settings_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="weighting is 'none', expected one of fisher, even"):
        EWC(task=TOY, weighting="none")
    with pytest.raises(ValueError, match="past_weight is -1"):
        LwF(task=TOY, past_weight=-1)
