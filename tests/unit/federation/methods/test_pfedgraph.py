from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replayfleet.federation.methods import pfedgraph_records as graph
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload
from replayfleet.federation.methods.pfedgraph import (
    PFedGraph,
    collaboration_weights,
    cosine_to,
    mixed_by_similarity,
    parameter_names,
    update_distances,
)
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.models.build import build_task_model, initialise
from tests.support.rng import rng
from tests.support.toy import LEARNING, TOY, accuracy, run_rounds, toy_data

SAMPLER = eager_sampler(TOY)
QUICK: dict[str, Any] = {"local_epochs": 2, "batch_size": 16, "learning_rate": 0.01, "weight_decay": 0.0}


def model(seed: int = 0) -> Parameters:
    return dict(initialise(build_task_model(TOY), rng(seed)).state_dict())


def moved(start: Parameters, seed: int, step: float = 0.1) -> dict[str, Tensor]:
    draw = rng(seed)
    return {
        name: tensor + step * torch.randn(tensor.shape, generator=draw) if tensor.is_floating_point() else tensor + seed
        for name, tensor in start.items()
    }


def random_problem(num_clients: int, seed: int) -> tuple[Tensor, Tensor, float]:
    draw = rng(seed)
    distances = 2 * torch.rand(num_clients, num_clients, generator=draw, dtype=torch.float64) - 1
    shares = torch.rand(num_clients, generator=draw, dtype=torch.float64)
    return distances, shares / shares.sum(), float(10 ** (2 * torch.rand(1, generator=draw) - 1.5))


@pytest.mark.parametrize("seed", range(20))
def test_the_collaboration_weights_satisfy_the_programmes_optimality_conditions(seed: int) -> None:
    distances, shares, strength = random_problem(2 + seed % 6, seed)
    weights = collaboration_weights(distances, shares, strength)
    gradients = 2 * strength * weights + distances - 2 * strength * shares
    assert bool((weights >= 0).all())
    assert torch.allclose(weights.sum(dim=1), torch.ones(len(shares), dtype=torch.float64), atol=1e-12)
    for row, gradient in zip(weights, gradients, strict=True):
        price = gradient[row > 0].mean()  # the multiplier of sum x = 1
        assert torch.allclose(gradient[row > 0], price, atol=1e-10)
        assert bool((gradient[row == 0] >= price - 1e-10).all())


def test_no_point_of_a_fine_grid_beats_the_collaboration_weights() -> None:
    distances, shares, strength = random_problem(3, 5)
    weights = collaboration_weights(distances, shares, strength)
    steps = torch.arange(201, dtype=torch.float64) / 200
    grid = torch.cartesian_prod(steps, steps)
    grid = grid[grid.sum(dim=1) <= 1]
    points = torch.cat([grid, 1 - grid.sum(dim=1, keepdim=True)], dim=1)

    def costs(at: Tensor, row: Tensor) -> Tensor:
        return strength * at.square().sum(dim=1) + at @ (row - 2 * strength * shares)

    for row, found in zip(distances, weights, strict=True):
        best = costs(points, row).min()
        assert costs(found[None], row)[0] <= best
        assert best - costs(found[None], row)[0] < 1e-3


def test_a_strong_pull_gives_everybody_the_sample_shares_and_a_weak_one_the_nearest_client() -> None:
    distances = torch.tensor([[-1.0, 0.2, -0.5], [0.2, -1.0, 0.1], [-0.5, 0.1, -1.0]])
    shares = torch.tensor([0.5, 0.2, 0.3])
    assert torch.allclose(collaboration_weights(distances, shares, 1e6), shares.double().expand(3, 3), atol=1e-5)
    assert torch.equal(collaboration_weights(distances, shares, 1e-9), torch.eye(3, dtype=torch.float64))


def test_the_collaboration_weights_of_two_clients_equal_their_closed_form() -> None:
    weights = collaboration_weights(torch.tensor([[-1.0, 0.0], [0.0, -1.0]]), torch.tensor([0.5, 0.5]), 1.0)
    assert weights.tolist() == [[0.75, 0.25], [0.25, 0.75]]  # p + (1/2 - 0) / 2 beside p - (1/2 - 0) / 2


@pytest.mark.parametrize(
    ("distances", "shares", "strength", "match"),
    [
        (torch.zeros(2, 3), torch.full((2,), 0.5), 1.0, "shape"),
        (torch.zeros(4), torch.full((4,), 0.25), 1.0, "shape"),
        (torch.zeros(0, 0), torch.zeros(0), 1.0, "shape"),
        (torch.zeros(2, 2), torch.full((3,), 1 / 3), 1.0, "shape"),
        (torch.zeros(2, 2), torch.tensor([0.9, 0.9]), 1.0, "sum to 1"),
        (torch.zeros(2, 2), torch.tensor([1.5, -0.5]), 1.0, "non-negative"),
        (torch.zeros(2, 2), torch.tensor([float("nan"), 0.5]), 1.0, "sum to 1"),
        (torch.tensor([[0.0, float("nan")], [0.0, 0.0]]), torch.full((2,), 0.5), 1.0, "finite"),
        (torch.tensor([[0.0, float("inf")], [0.0, 0.0]]), torch.full((2,), 0.5), 1.0, "finite"),
        (torch.zeros(2, 2), torch.full((2,), 0.5), 0.0, "strength"),
        (torch.zeros(2, 2), torch.full((2,), 0.5), -1.0, "strength"),
        (torch.zeros(2, 2), torch.full((2,), 0.5), float("nan"), "strength"),
    ],
)
def test_an_impossible_programme_is_refused(distances: Tensor, shares: Tensor, strength: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        collaboration_weights(distances, shares, strength)


def test_distances_are_cosines_of_what_moved_and_ignore_batch_norm_statistics() -> None:
    start = {"w": torch.tensor([5.0, 5.0]), "norm.running_mean": torch.tensor([0.0])}
    models = [
        {"w": start["w"] + torch.tensor(step), "norm.running_mean": torch.tensor([statistic])}
        for step, statistic in [((1.0, 0.0), 9.0), ((0.0, 2.0), -9.0), ((3.0, 3.0), 0.0), ((1.0, 0.1), 1.0)]
    ]
    distances = update_distances(models, start, ["w"])
    half = 0.5**0.5
    assert distances[:3, :3].flatten().tolist() == pytest.approx([-1, 0, -half, 0, -1, -half, -half, -half, -1])
    assert distances[0, 3].item() == -1.0  # a cosine of 0.995 counts as 1
    still = update_distances([start, models[0]], start, ["w"])
    assert still.tolist() == [[0.0, 0.0], [0.0, -1.0]]


def test_every_client_gets_the_mix_that_its_row_of_the_graph_says() -> None:
    start = {"w": torch.tensor([0.0, 0.0]), "norm.running_var": torch.tensor([0.0])}
    models = {
        "b": {"w": torch.tensor([0.0, 4.0]), "norm.running_var": torch.tensor([4.0])},
        "a": {"w": torch.tensor([4.0, 0.0]), "norm.running_var": torch.tensor([8.0])},
    }
    mixtures = mixed_by_similarity(models, {"a": 5, "b": 5}, start, 1.0, names=["w"])
    assert mixtures["a"].weights == {"a": 0.75, "b": 0.25}
    assert mixtures["a"].task_parameters["w"].tolist() == [3.0, 1.0]
    assert mixtures["b"].task_parameters["w"].tolist() == [1.0, 3.0]
    assert mixtures["a"].task_parameters["norm.running_var"].tolist() == [7.0]


def test_the_cosine_and_its_gradient_equal_their_closed_forms() -> None:
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[3.0, 0.0]]))
        module.bias.copy_(torch.tensor([4.0]))
    reference = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([2.0]), "elsewhere": torch.zeros(1)}
    cosine = cosine_to(module, reference)
    cosine.backward()
    assert cosine.item() == pytest.approx((3 + 8) / (5 * 3))
    theta, other = torch.tensor([3.0, 0.0, 4.0]), torch.tensor([1.0, 2.0, 2.0])
    expected = other / 15 - (11 / 15) * theta / 25
    assert module.bias.grad is not None
    assert torch.cat([module.weight.grad.flatten(), module.bias.grad]).tolist() == pytest.approx(expected.tolist())


def test_the_sign_decides_whether_the_client_is_held_or_pushed_away() -> None:
    data = toy_data({0: 8, 1: 8})
    start = model()
    module = build_task_model(TOY)

    def end(sign: str, weight: float) -> float:
        method = PFedGraph(task=TOY, **QUICK, regulariser_sign=sign, regulariser_weight=weight)
        _, upload = method.local_round(NoState(), data, graph.Download(start), rng(), sampler=SAMPLER)
        module.load_state_dict(upload.task_parameters)
        return float(cosine_to(module, start).detach())

    assert end("minus", 3000.0) > end("minus", 0.0) > end("plus", 3000.0)


def test_round_0_has_no_regulariser_and_sends_its_start_back() -> None:
    data = toy_data({0: 8, 1: 8})
    method = PFedGraph(task=TOY, **QUICK, regulariser_weight=50.0)
    first = method.initial_download(seeded_generator(0, 0, "initial"))
    _, upload = method.local_round(NoState(), data, first, rng(), sampler=SAMPLER)
    plain = FedAvg(task=TOY, **QUICK)
    _, expected = plain.local_round(NoState(), data, TaskDownload(first.task_parameters), rng(), sampler=SAMPLER)
    assert same_bits(upload.task_parameters, expected.task_parameters)
    assert upload.initial is first.task_parameters
    _, later = method.local_round(NoState(), data, graph.Download(first.task_parameters), rng(), sampler=SAMPLER)
    assert not later.initial


def test_a_huge_strength_without_regulariser_equals_fedavg() -> None:
    rounds = [{"a": {0: 8}, "b": {1: 6}}, {"a": {1: 4}, "b": {0: 8}}]
    method = PFedGraph(task=TOY, **{**QUICK, "local_epochs": 1}, strength=1e6, regulariser_weight=0.0)
    _, mixed = run_rounds(method, rounds)
    _, averaged = run_rounds(FedAvg(task=TOY, **{**QUICK, "local_epochs": 1}), rounds)
    for client in "ab":
        for name, tensor in averaged[client].task_parameters.items():
            assert torch.allclose(mixed[client].task_parameters[name], tensor, atol=1e-4), name


def test_the_order_of_arrival_changes_nothing_and_inputs_stay_untouched() -> None:
    start = model()
    uploads = {c: graph.Upload(moved(start, seed), 10 * seed, start) for seed, c in enumerate("abc", 1)}
    copies = {c: {n: t.clone() for n, t in u.task_parameters.items()} for c, u in uploads.items()}
    method = PFedGraph(task=TOY)
    state, downloads = method.aggregate(graph.AggregatorState(), uploads, rng(), sampler=SAMPLER)
    turned = dict(reversed(uploads.items()))
    turned_state, other = method.aggregate(graph.AggregatorState(), turned, rng(), sampler=SAMPLER)
    assert same_bits(state.common, turned_state.common)
    for client in uploads:
        assert same_bits(downloads[client].task_parameters, other[client].task_parameters)
        assert downloads[client].weights == other[client].weights
        assert same_bits(uploads[client].task_parameters, copies[client])


def test_an_absent_client_keeps_its_model_and_a_late_one_gets_the_average() -> None:
    start = model()
    method = PFedGraph(task=TOY)
    uploads = {c: graph.Upload(moved(start, seed), 10, start) for seed, c in enumerate("ab", 1)}
    state, first = method.aggregate(graph.AggregatorState(), uploads, rng(), sampler=SAMPLER)
    state, second = method.aggregate(state, {"b": graph.Upload(moved(start, 7), 10)}, rng(), sampler=SAMPLER)
    assert second["a"].task_parameters is first["a"].task_parameters
    assert second["b"].weights == {"b": 1.0}
    assert same_bits(state.initial, start)
    initial = method.initial_download(rng())
    assert method.download_for(state, "a", initial) == first["a"]
    late = method.download_for(state, "late", initial)
    assert late.task_parameters is state.common
    assert not late.is_initial
    assert method.download_for(graph.AggregatorState(), "late", initial) is initial


def test_one_client_that_says_it_began_elsewhere_does_not_decide_where_all_began() -> None:
    start = model()
    half = {name: tensor / 2 if tensor.is_floating_point() else tensor for name, tensor in start.items()}
    uploads = {c: graph.Upload(moved(start, seed), 10, dict(start)) for seed, c in enumerate("abc", 1)}
    uploads["a"] = graph.Upload(uploads["a"].task_parameters, 10, half)
    state, _ = PFedGraph(task=TOY).aggregate(graph.AggregatorState(), uploads, rng(), sampler=SAMPLER)
    assert same_bits(state.initial, start)


def test_what_travels_and_what_is_stored_come_back_to_the_bit() -> None:
    start = model()
    uploads = {c: graph.Upload(moved(start, seed), 10, start) for seed, c in enumerate("ab", 1)}
    state, downloads = PFedGraph(task=TOY).aggregate(graph.AggregatorState(), uploads, rng(), sampler=SAMPLER)
    again = graph.AggregatorState.unpack(state.pack())
    assert same_bits(again.initial, state.initial)
    assert same_bits(again.common, state.common)
    assert again.clients == state.clients
    assert graph.AggregatorState.unpack(graph.AggregatorState().pack()) == graph.AggregatorState()
    for download in [downloads["a"], PFedGraph(task=TOY).initial_download(rng())]:
        assert graph.Download.unpack(download.pack()) == download
    upload = graph.Upload.unpack(uploads["a"].pack())
    assert upload == uploads["a"]
    assert sorted(uploads["a"].pack().parameter_sets) == ["initial", "task"]


def test_uploads_have_the_layout_of_task_models() -> None:
    method = PFedGraph(task=TOY)
    layout = method.upload_layout("initial")
    assert layout.keys() == model().keys()
    assert method.upload_layout("task") is not None
    assert method.upload_layout("average") is None
    assert not {name for name in parameter_names(TOY) if "running" in name or "num_batches" in name}
    assert parameter_names(TOY) < model().keys()


def test_impossible_uploads_and_settings_are_refused() -> None:
    method = PFedGraph(task=TOY)
    with pytest.raises(ValueError, match="without uploads"):
        method.aggregate(graph.AggregatorState(), {}, rng(), sampler=SAMPLER)
    with pytest.raises(ValueError, match="initial"):
        method.aggregate(graph.AggregatorState(), {"a": graph.Upload(model(), 1)}, rng(), sampler=SAMPLER)
    with pytest.raises(ValueError, match="num_samples"):
        method.check_upload(graph.Upload({}, 0))
    with pytest.raises(ValueError, match="strength"):
        PFedGraph(task=TOY, strength=0.0)
    with pytest.raises(ValueError, match="regulariser_sign"):
        PFedGraph(task=TOY, regulariser_sign="code")
    with pytest.raises(ValueError, match="regulariser_weight"):
        PFedGraph(task=TOY, regulariser_weight=float("nan"))


def test_one_seed_gives_the_same_bits() -> None:
    data, start = toy_data({0: 6, 1: 6}), model()
    copy = {name: tensor.clone() for name, tensor in start.items()}
    method = PFedGraph(task=TOY, **QUICK)
    first, second = (
        method.local_round(NoState(), data, graph.Download(start), rng(3), sampler=SAMPLER)[1] for _ in range(2)
    )
    assert same_bits(first.task_parameters, second.task_parameters)
    assert same_bits(start, copy)


@pytest.mark.learning
def test_unlike_clients_are_told_apart_and_serve_better_than_with_fedavg() -> None:
    classes = {"a": (0, 1), "b": (2, 3)}
    method = PFedGraph(task=TOY, **LEARNING, strength=0.3)
    initial = method.initial_download(seeded_generator(0, 0, "initial"))
    uploads = {
        client: method.local_round(NoState(), toy_data(dict.fromkeys(own, 24)), initial, rng(), sampler=SAMPLER)[1]
        for client, own in classes.items()
    }
    state, downloads = method.aggregate(graph.AggregatorState(), uploads, rng(), sampler=SAMPLER)

    def mean_accuracy(models: dict[str, Parameters]) -> float:
        return sum(accuracy(models[c], dict.fromkeys(own, 20)) for c, own in classes.items()) / len(classes)

    assert downloads["a"].weights["a"] > downloads["a"].weights["b"]
    personalised = mean_accuracy({client: downloads[client].task_parameters for client in classes})
    assert personalised > 0.8
    assert personalised > mean_accuracy(dict.fromkeys(classes, state.common))  # FedAvg's model
