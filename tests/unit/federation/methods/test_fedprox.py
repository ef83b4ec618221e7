from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.fedprox import DISTANCES, FedProx, distance, squared_distance
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.models.build import build_task_model, initialise
from tests.support.toy import LEARNING, TOY, accuracy, run_rounds, toy_data

SAMPLER = eager_sampler(TOY)
QUICK: dict[str, Any] = {"local_epochs": 2, "batch_size": 8, "learning_rate": 0.01, "weight_decay": 0.0}


def start() -> TaskDownload:
    return TaskDownload(dict(initialise(build_task_model(TOY), torch.Generator().manual_seed(0)).state_dict()))


def trained(method: Any, download: TaskDownload, seed: int = 0) -> Parameters:
    data, rng = toy_data({0: 8, 1: 8}), torch.Generator().manual_seed(seed)
    _, upload = method.local_round(NoState(), data, download, rng, sampler=SAMPLER)
    parameters: Parameters = upload.task_parameters
    return parameters


def test_the_squared_distance_and_its_gradient_equal_their_closed_forms() -> None:
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 2.0]]))
        module.bias.copy_(torch.tensor([3.0]))
    reference = {"weight": torch.tensor([[0.0, 4.0]]), "bias": torch.tensor([3.5]), "elsewhere": torch.ones(1)}
    distance = squared_distance(module, reference)
    distance.backward()
    assert distance.item() == pytest.approx(1 + 4 + 0.25)
    assert module.bias.grad is not None
    assert module.weight.grad.tolist() == [[2.0, -4.0]]
    assert module.bias.grad.tolist() == [-1.0]


def test_the_distance_of_mfcls_code_is_a_sum_of_norms_whose_gradients_have_length_one() -> None:
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[3.0, 4.0]]))
        module.bias.copy_(torch.tensor([3.5]))
    found = distance(module, {"weight": torch.zeros(1, 2), "bias": torch.tensor([3.5])}, "norm")
    found.backward()
    assert found.item() == pytest.approx(5)
    assert module.weight.grad.tolist()[0] == pytest.approx([0.6, 0.8])
    assert module.bias.grad.tolist() == [0.0], "where nothing has moved"
    assert not same_bits(*(trained(FedProx(task=TOY, **QUICK, mu=1.0, distance=kind), start()) for kind in DISTANCES))
    with pytest.raises(ValueError, match="distance"):
        FedProx(task=TOY, distance="cubed")


def test_the_first_step_is_fedavgs_and_the_second_is_held_back_by_its_own_length() -> None:
    first: dict[str, Any] = {**QUICK, "local_epochs": 1, "batch_size": 16, "momentum": 0.0}
    two: dict[str, Any] = {**first, "local_epochs": 2}
    origin = start()
    after_one = trained(FedAvg(task=TOY, **first), origin)
    assert same_bits(trained(FedProx(task=TOY, **first, mu=1.0), origin), after_one)  # the term's gradient is 0 at w_t
    free, held = trained(FedAvg(task=TOY, **two), origin), trained(FedProx(task=TOY, **two, mu=1.0), origin)
    name = "head.weight"
    step = after_one[name] - origin.task_parameters[name]
    assert torch.allclose(held[name], free[name] - 0.01 * 1.0 * step, atol=1e-7)
    assert not torch.equal(held[name], free[name])


def test_without_the_proximal_term_it_equals_fedavg_to_the_bit() -> None:
    rounds = [{"a": {0: 8, 1: 4}, "b": {2: 8}}, {"a": {3: 8}, "b": {1: 8}}]
    _, ours = run_rounds(FedProx(task=TOY, **QUICK, mu=0.0), rounds)
    _, theirs = run_rounds(FedAvg(task=TOY, **QUICK), rounds)
    assert same_bits(ours["a"].task_parameters, theirs["a"].task_parameters)


def test_a_larger_mu_ends_nearer_to_the_average_model() -> None:
    origin = start()
    module = build_task_model(TOY)

    def travelled(mu: float) -> float:
        module.load_state_dict(trained(FedProx(task=TOY, **QUICK, mu=mu), origin))
        return float(squared_distance(module, origin.task_parameters).detach())

    assert travelled(10.0) < travelled(1.0) < travelled(0.0)


def test_one_seed_gives_the_same_bits_and_the_download_stays_untouched() -> None:
    origin = start()
    copy = {name: tensor.clone() for name, tensor in origin.task_parameters.items()}
    method = FedProx(task=TOY, **QUICK, mu=0.1)
    assert same_bits(trained(method, origin, seed=3), trained(method, origin, seed=3))
    assert same_bits(origin.task_parameters, copy)


@pytest.mark.parametrize("mu", [-0.1, float("nan"), True])
def test_an_impossible_mu_is_refused(mu: float) -> None:
    with pytest.raises(ValueError, match="mu is"):
        FedProx(task=TOY, mu=mu)


@pytest.mark.learning
def test_it_learns_the_toy_problem() -> None:
    method = FedProx(task=TOY, **LEARNING, mu=0.01)
    download = method.initial_download(seeded_generator(0, 0, "initial"))
    data = toy_data({0: 16, 1: 16, 2: 16})
    _, upload = method.local_round(NoState(), data, download, torch.Generator().manual_seed(0), sampler=SAMPLER)
    assert accuracy(upload.task_parameters, {0: 20, 1: 20, 2: 20}) > 0.8
