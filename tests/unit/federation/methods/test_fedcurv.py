from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.fedcurv import FedCurv, curvature_penalty, diagonal_fisher
from replayfleet.federation.methods.fedcurv_records import AggregatorState, Download, Upload
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.task_records import NoState
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.models.build import build_task_model, initialise
from tests.support.toy import TOY, run_rounds, toy_data

TASK = replace(TOY, architecture="lenet")
QUICK: dict[str, Any] = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.05, "momentum": 0.0}


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    return initialise(build_task_model(TASK), torch.Generator().manual_seed(seed)).state_dict()


def test_the_fisher_information_of_a_softmax_bias_is_the_squared_residual() -> None:
    data, parameters = toy_data({0: 3, 1: 4}), model()
    residuals = judge_with(TASK, parameters)(data.images).softmax(dim=1) - nn.functional.one_hot(data.labels, 4)
    fisher = diagonal_fisher(TASK, parameters, data.images, data.labels, batch_size=1)
    torch.testing.assert_close(fisher["head.bias"], residuals.square().mean(dim=0))
    assert fisher.keys() == dict(build_task_model(TASK).named_parameters()).keys()


def test_all_batches_count_in_whatever_order() -> None:
    data, parameters = toy_data({0: 8, 1: 8}), model()
    pieces = [
        diagonal_fisher(TASK, parameters, data.images[part], data.labels[part], batch_size=4)["head.weight"]
        for part in torch.arange(16).split(4)
    ]
    whole = diagonal_fisher(TASK, parameters, data.images, data.labels, batch_size=4)["head.weight"]
    torch.testing.assert_close(whole, torch.stack(pieces).mean(dim=0))
    turned = diagonal_fisher(TASK, parameters, data.images.flip(0), data.labels.flip(0), batch_size=4)["head.weight"]
    torch.testing.assert_close(turned, whole)


def test_the_penalty_is_the_weighted_squared_distance_to_the_others_less_a_constant() -> None:
    layer = nn.Linear(3, 1, bias=False)
    thetas, fishers = torch.randn(2, 1, 3), torch.rand(2, 1, 3)
    weights, targets = fishers.sum(dim=0), (fishers * thetas).sum(dim=0)
    found = curvature_penalty(layer, {"weight": weights}, {"weight": targets})
    constant = (fishers * thetas.square()).sum()
    torch.testing.assert_close(found + constant, (fishers * (layer.weight - thetas).square()).sum())


def test_a_client_is_held_to_the_others_alone() -> None:
    method = FedCurv(task=TASK)
    uploads = {
        name: Upload(model(seed), 4, {"head.bias": torch.full((4,), float(seed + 1))})
        for seed, name in enumerate(("a", "b", "c"))
    }
    state, downloads = method.aggregate(AggregatorState(), uploads, torch.Generator(), sampler=eager_sampler(TASK))
    assert downloads["a"].weights["head.bias"].tolist() == [5.0] * 4
    biases = [uploads[name].task_parameters["head.bias"] for name in ("b", "c")]
    torch.testing.assert_close(downloads["a"].targets["head.bias"], 2 * biases[0] + 3 * biases[1])
    assert method.download_for(state, "absent", downloads["a"]).weights["head.bias"].tolist() == [6.0] * 4
    _, alone = method.aggregate(state, {"a": uploads["a"]}, torch.Generator(), sampler=eager_sampler(TASK))
    assert alone["a"].weights == {}
    assert alone["b"].weights["head.bias"].tolist() == [1.0] * 4
    kept = AggregatorState.unpack(state.pack())
    for name, download in downloads.items():
        again = method.download_for(kept, name, download)
        assert same_bits(again.weights, download.weights), "a resumed run held it to itself too"
        assert same_bits(again.targets, download.targets)


def test_without_importance_it_is_fedavg_to_the_bit() -> None:
    rounds = [{"a": {0: 8, 1: 8}, "b": {2: 8}}, {"a": {2: 8}, "b": {3: 8}}]
    _, ours = run_rounds(FedCurv(task=TASK, importance=0.0, **QUICK), rounds)
    _, fedavg = run_rounds(FedAvg(task=TASK, **QUICK), rounds)
    assert same_bits(ours["a"].task_parameters, fedavg["a"].task_parameters)
    _, held = run_rounds(FedCurv(task=TASK, importance=10.0, **QUICK), rounds)
    assert not same_bits(held["a"].task_parameters, fedavg["a"].task_parameters)


@pytest.mark.parametrize("sharp", [1e3, 1e30, 3e38])
def test_what_is_as_sharp_as_a_lie_holds_a_parameter_and_lets_nothing_diverge(sharp: float) -> None:
    method = FedCurv(task=TASK, importance=1.0, **QUICK)
    start, target = model(), model(1)
    uploads = {
        name: Upload(target, 4, {key: torch.full_like(tensor, sharp) for key, tensor in target.items()})
        for name in ("b", "c")
    }
    _, downloads = method.aggregate(AggregatorState(), uploads, torch.Generator(), sampler=eager_sampler(TASK))
    held = Download(start, downloads["b"].weights, downloads["b"].targets)
    _, upload = method.local_round(
        NoState(), toy_data({0: 8, 1: 8}), held, seeded_generator(0, 0, "a"), sampler=eager_sampler(TASK)
    )
    for name, tensor in upload.task_parameters.items():
        assert bool(tensor.isfinite().all())
        assert float((tensor - target[name]).abs().max()) < 2.0


@pytest.mark.parametrize("settings", [{"learning_rate": 0.0}, {"importance": 1e-40}, {"importance": 5e-324}])
def test_steps_and_penalties_of_next_to_nothing_are_nothing(settings: dict[str, float]) -> None:
    rounds = [{"a": {0: 8, 1: 8}, "b": {2: 8}}, {"a": {2: 8}, "b": {3: 8}}]
    changed = QUICK | {key: value for key, value in settings.items() if key in QUICK}
    _, ours = run_rounds(FedCurv(task=TASK, **(QUICK | settings)), rounds)
    _, fedavg = run_rounds(FedAvg(task=TASK, **changed), rounds)
    for name, tensor in ours["a"].task_parameters.items():
        torch.testing.assert_close(tensor, fedavg["a"].task_parameters[name])


def test_an_upload_of_negative_information_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fisher of head.bias is negative, expected 0 or more"):
        FedCurv(task=TASK).check_upload(Upload(model(), 4, {"head.bias": torch.tensor([-1.0, 0, 0, 0])}))
