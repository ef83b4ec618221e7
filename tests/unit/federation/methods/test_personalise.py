from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from replayfleet.federation.methods.kit.each import spread_by
from replayfleet.federation.methods.steps import precision
from replayfleet.federation.methods.steps.averaging import project_to_simplex, weighted_average
from replayfleet.federation.methods.steps.personalisation import mixtures
from replayfleet.federation.methods.steps.personalisation.mixtures import nearest, personalise_all
from replayfleet.federation.methods.steps.personalisation.personalise import (
    Mixture,
    StackedParameters,
    WeightSearch,
    personalised_weights,
)
from replayfleet.federation.methods.steps.personalisation.together import MixtureJob, mixtures_together
from replayfleet.federation.methods.steps.replay import Replay
from replayfleet.federation.methods.steps.task_model import Optimisation, judge_with, train_task_model
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.folding import build_folded_task_model, fold_batch_norm
from replayfleet.models.specs import ADDED_MODELS, TaskSpec
from tests.support.toy import TOY, toy_data

SEARCH = WeightSearch(num_epochs=3, batch_size=16, learning_rate=0.05, momentum=0.9)


@pytest.fixture(scope="module")
def experts() -> list[dict[str, torch.Tensor]]:
    """Three models that start alike and know classes 0+1, 2+3 and 0+1."""
    start = initialise(build_task_model(TOY), torch.Generator().manual_seed(0)).state_dict()
    schedule = Optimisation(num_epochs=4, batch_size=16, learning_rate=0.02, momentum=0.9, weight_decay=0.0)
    known = [{0: 24, 1: 24}, {2: 24, 3: 24}, {0: 24, 1: 24}]
    return [
        train_task_model(TOY, start, data.images, data.labels, schedule, torch.Generator().manual_seed(seed))
        for seed, data in enumerate(toy_data(counts, seed=seed) for seed, counts in enumerate(known))
    ]


def replay_of(counts: dict[int, int], seed: int = 50) -> Replay:
    data = toy_data(counts, seed)
    return Replay(data.images, data.labels, num_tries=len(data.labels), num_filled=0)


def test_projection_gives_the_nearest_point_of_the_simplex() -> None:
    assert torch.allclose(project_to_simplex(torch.tensor([0.2, 0.3, 0.5])), torch.tensor([0.2, 0.3, 0.5]))
    assert torch.allclose(project_to_simplex(torch.tensor([3.0, 0.0])), torch.tensor([1.0, 0.0]))
    assert torch.allclose(project_to_simplex(torch.tensor([1.0, 1.0, -5.0])), torch.tensor([0.5, 0.5, 0.0]))
    assert torch.equal(project_to_simplex(torch.tensor([-3e30, 2e30, 1e10])), torch.tensor([0.0, 1.0, 0.0]))
    points = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    projected = project_to_simplex(points)
    assert torch.allclose(projected.sum(dim=1), torch.ones(20), atol=1e-6)
    assert bool((projected >= 0).all())
    others = torch.rand(200, 6, generator=torch.Generator().manual_seed(1))
    others /= others.sum(dim=1, keepdim=True)
    least = (points - projected).norm(dim=1)
    assert bool((torch.cdist(points, others).min(dim=1).values >= least - 1e-6).all())


def test_mixing_the_stack_equals_the_weighted_average(experts: list[dict[str, torch.Tensor]]) -> None:
    weights = torch.tensor([0.5, 0.2, 0.3])
    mixed = StackedParameters(experts).mix(weights)
    average = weighted_average(experts, weights)
    assert mixed.keys() == {name for name, tensor in average.items() if tensor.is_floating_point()}
    assert all(torch.allclose(mixed[name], average[name], atol=1e-6) for name in mixed)


def test_the_gradient_of_the_mixed_loss_matches_a_finite_difference(experts: list[dict[str, torch.Tensor]]) -> None:
    """BatchNorm statistics are part of the mixture, so they are part of the gradient."""
    stacked, data = StackedParameters(experts), toy_data({0: 12, 2: 12}, seed=3)
    module = build_folded_task_model(TOY)

    def loss(weights: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(module, fold_batch_norm(stacked.mix(weights)), (data.images,))
        return torch.nn.functional.cross_entropy(logits, data.labels)

    point = torch.tensor([0.5, 0.3, 0.2], requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(point), point)
    with torch.no_grad():
        for index in range(3):
            step = torch.zeros(3)
            step[index] = 1e-3
            numeric = (loss(point + step) - loss(point - step)) / 2e-3
            assert gradient[index].item() == pytest.approx(numeric.item(), rel=0.02, abs=0.02)


class Centred(torch.nn.Module):
    """Has a mean that no BatchNorm has."""

    running_mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))

    def draw(self, rng: torch.Generator) -> None:
        self.running_mean.fill_(0.01)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return maps - self.running_mean[:, None, None]


class NotOurs(torch.nn.Module):
    """Normalises what isn't a convolution's output, by names and an epsilon of its own; has an integer buffer."""

    order: torch.Tensor

    def __init__(self, spec: TaskSpec) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(1, eps=0.1)
        self.conv = torch.nn.Conv2d(1, 4, 5, 4, bias=False)
        self.stem = torch.nn.Conv2d(4, 4, 3, bias=False)
        self.groups, self.after = torch.nn.GroupNorm(2, 4), torch.nn.BatchNorm2d(4, affine=False)
        self.centred = Centred()
        self.head = torch.nn.Linear(4, spec.num_classes)
        self.register_buffer("order", torch.zeros(4, dtype=torch.int64))

    def draw(self, rng: torch.Generator) -> None:
        self.order.copy_(torch.tensor([2, 0, 1, 3]))

    def features(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.centred(self.after(self.groups(self.stem(self.conv(self.norm(images)).relu()))))
        return maps.relu().mean(dim=(2, 3))[:, self.order]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


@pytest.mark.parametrize("together", [False, True])
def test_networks_of_packages_are_mixed_wherever_their_normalisations_stand(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    monkeypatch.setitem(ADDED_MODELS.built_in, "not-ours", NotOurs)
    spec = replace(TOY, architecture="not-ours")
    models = []
    for seed, classes in enumerate([{0: 8, 1: 8}, {2: 8, 3: 8}, {0: 8, 3: 8}]):
        module = initialise(build_task_model(spec), torch.Generator().manual_seed(seed)).train()
        with torch.no_grad():
            module(toy_data(classes, seed=seed).images)  # statistics of its own
        models.append(module.state_dict())
    stacked, replay = StackedParameters(models), replay_of({0: 6, 2: 6})
    long = replace(SEARCH, num_epochs=9, learning_rate=0.3)
    found = personalise_all(
        spec, stacked, [(0, replay), (1, replay)], long, torch.Generator().manual_seed(0), together=together
    )
    assert {mixture.chosen for mixture in found} == {"optimised"}
    for mixture in found:
        mixed = weighted_average(models, mixture.weights.double() / mixture.weights.double().sum())
        loss = torch.nn.functional.cross_entropy(judge_with(spec, mixed)(replay.images), replay.labels)
        assert mixture.loss == pytest.approx(loss.item(), abs=1e-5)


def loss_on(experts: list[dict[str, torch.Tensor]], weights: torch.Tensor, replay: Replay) -> float:
    """Eq. 3's loss, by way of the averaged model itself: nothing stacked, nothing folded."""
    mixed = weighted_average(experts, weights)
    return torch.nn.functional.cross_entropy(judge_with(TOY, mixed)(replay.images), replay.labels).item()


def gradient_on(experts: list[dict[str, torch.Tensor]], weights: torch.Tensor, replay: Replay) -> torch.Tensor:
    """Its gradient along the simplex, by finite differences; the rest, equal in all weights, projection ignores."""
    steps = 2e-3 * (torch.eye(len(experts)) - 1 / len(experts))
    return torch.tensor(
        [(loss_on(experts, weights + step, replay) - loss_on(experts, weights - step, replay)) / 4e-3 for step in steps]
    )


def test_a_descent_of_whole_batches_is_projected_gradient_descent_with_momentum_and_ends_in_the_mean_of_its_points(
    experts: list[dict[str, torch.Tensor]],
) -> None:
    replay, rate, momentum = replay_of({0: 6, 2: 6, 3: 12}), 0.02, 0.9
    point, velocity, expected = torch.full((3,), 1 / 3), torch.zeros(3), []
    for _ in range(2):
        velocity = momentum * velocity + gradient_on(experts, point, replay)
        point = project_to_simplex(point - rate * velocity)
        expected.append(point)
    for num_epochs in (1, 2):
        search = WeightSearch(num_epochs=num_epochs, batch_size=64, learning_rate=rate, momentum=momentum)
        mixture = personalised_weights(
            TOY, StackedParameters(experts), 0, replay, search, torch.Generator().manual_seed(0)
        )
        assert mixture.chosen == "optimised"
        moved = (torch.stack(expected[:num_epochs]).mean(dim=0) - 1 / 3).abs().max().item()
        assert mixture.weights.tolist() == pytest.approx(
            torch.stack(expected[:num_epochs]).mean(dim=0).tolist(), abs=0.03 * moved
        )


def test_the_loss_that_is_told_is_that_of_the_mixed_model_on_the_whole_replay(
    experts: list[dict[str, torch.Tensor]],
) -> None:
    replay = replay_of({0: 200, 2: 100})  # more than is judged at a time
    mixture = personalised_weights(TOY, StackedParameters(experts), 0, replay, SEARCH, torch.Generator().manual_seed(0))
    assert mixture.loss == pytest.approx(loss_on(experts, mixture.weights, replay), rel=1e-4)


def test_a_descent_in_bfloat16_is_judged_in_float32(experts: list[dict[str, torch.Tensor]]) -> None:
    replay, stacked = replay_of({0: 20, 2: 10}), StackedParameters(experts)
    half = replace(SEARCH, precision="bfloat16")
    found = personalised_weights(TOY, stacked, 0, replay, half, torch.Generator().manual_seed(0))
    assert found.loss == pytest.approx(loss_on(experts, found.weights, replay), rel=1e-4)
    assert found.loss <= loss_on(experts, torch.full((3,), 1 / 3), replay) * (1 + 1e-4), "the average was a candidate"
    assert found.weights.sum().item() == pytest.approx(1)
    assert found.weights.min().item() >= 0


def test_the_descent_stops_when_it_makes_no_progress(experts: list[dict[str, torch.Tensor]]) -> None:
    draws = []
    for patience in (0, 1):
        search = WeightSearch(num_epochs=12, batch_size=16, learning_rate=0.0, momentum=0.0, patience=patience)
        rng = torch.Generator().manual_seed(0)
        personalised_weights(TOY, StackedParameters(experts), 0, replay_of({0: 8, 1: 8}), search, rng)
        draws.append(rng.get_state())
    reference = torch.Generator().manual_seed(0)
    for _ in range(2):  # the first epoch is progress, the second is none
        torch.randperm(16, generator=reference)
    assert torch.equal(draws[1], reference.get_state())
    assert not torch.equal(draws[0], reference.get_state())


@pytest.mark.learning
def test_weights_go_to_those_who_know_the_clients_classes(experts: list[dict[str, torch.Tensor]]) -> None:
    mixture = personalised_weights(
        TOY, StackedParameters(experts), 1, replay_of({2: 24, 3: 24}), SEARCH, torch.Generator().manual_seed(0)
    )
    assert mixture.weights[1] > 0.6
    assert mixture.weights.sum().item() == pytest.approx(1, abs=1e-5)
    assert bool((mixture.weights >= 0).all())


@pytest.mark.learning
def test_the_mixture_is_never_worse_on_the_replay_than_own_or_average(experts: list[dict[str, torch.Tensor]]) -> None:
    uphill = WeightSearch(num_epochs=1, batch_size=8, learning_rate=-50.0, momentum=0.0)
    stacked, replay = StackedParameters(experts), replay_of({2: 20, 3: 20})
    still = WeightSearch(num_epochs=0, batch_size=8, learning_rate=0.0, momentum=0.0)
    reference = personalised_weights(TOY, stacked, 1, replay, still, torch.Generator())
    mixture = personalised_weights(TOY, stacked, 1, replay, uphill, torch.Generator().manual_seed(0))
    assert mixture.chosen in {"own", "average"}
    assert mixture.loss == reference.loss  # the better of the two, for a descent of no step is the average


@pytest.mark.parametrize("where", ["another's model", "the replay"])
def test_nan_ends_the_descent_and_the_weights_stay_on_the_simplex(
    experts: list[dict[str, torch.Tensor]], where: str
) -> None:
    models = [{name: tensor.clone() for name, tensor in expert.items()} for expert in experts]
    replay = replay_of({0: 20, 1: 20})
    if where == "the replay":
        replay.images[3, 0, 0, 0] = torch.nan
    else:
        next(tensor for tensor in models[1].values() if tensor.is_floating_point()).fill_(torch.nan)
    mixture = personalised_weights(TOY, StackedParameters(models), 0, replay, SEARCH, torch.Generator().manual_seed(0))
    assert bool(mixture.weights.isfinite().all())
    assert mixture.weights.sum().item() == pytest.approx(1)


def test_a_single_client_keeps_its_own_model(experts: list[dict[str, torch.Tensor]]) -> None:
    mixture = personalised_weights(
        TOY, StackedParameters(experts[:1]), 0, replay_of({0: 8, 1: 8}), SEARCH, torch.Generator()
    )
    assert mixture.weights.tolist() == [1.0]


def test_one_clients_replay_never_changes_anothers_weights(experts: list[dict[str, torch.Tensor]]) -> None:
    stacked = StackedParameters(experts)
    second = (1, replay_of({2: 8, 3: 8}))
    short = personalise_all(TOY, stacked, [(0, replay_of({0: 8})), second], SEARCH, torch.Generator().manual_seed(4))
    long = personalise_all(TOY, stacked, [(0, replay_of({0: 40})), second], SEARCH, torch.Generator().manual_seed(4))
    assert torch.equal(short[1].weights, long[1].weights)


def test_an_empty_replay_is_refused(experts: list[dict[str, torch.Tensor]]) -> None:
    rng = torch.Generator()
    empty = Replay(torch.empty(0, 1, 28, 28), torch.empty(0, dtype=torch.int64), 0, 0)
    with pytest.raises(ValueError, match="at least one"):
        personalised_weights(TOY, StackedParameters(experts), 0, empty, SEARCH, rng)
    with pytest.raises(ValueError, match="at least one"):
        personalise_all(TOY, StackedParameters(experts), [(0, empty), (1, empty)], SEARCH, rng, together=True)


def test_a_model_that_is_not_trusted_takes_part_in_its_own_client_s_mixture_alone(
    experts: list[dict[str, torch.Tensor]],
) -> None:
    replays = [(0, replay_of({2: 12, 3: 12})), (1, replay_of({0: 12, 1: 12, 2: 12}))]
    stacked = StackedParameters(experts)
    first, second = personalise_all(TOY, stacked, replays, SEARCH, torch.Generator().manual_seed(0), trusted=(0, 2))
    assert first.weights[1].item() == 0.0  # though it alone knows these classes
    assert second.weights[1].item() > 0.1
    assert [mixture.weights.sum().item() for mixture in (first, second)] == pytest.approx([1.0, 1.0])
    assert first.loss == pytest.approx(loss_on(experts, first.weights, replays[0][1]), rel=1e-3)


@pytest.mark.parametrize("everybody", [((0, 1, 2), None), (None, nearest([{0: 1}, {1: 1}, {2: 1}], 2))])
def test_trusting_everybody_or_having_everybody_near_changes_no_bit(
    experts: list[dict[str, torch.Tensor]], everybody: tuple[Any, Any]
) -> None:
    replays = [(place, replay_of({0: 12, 2: 12})) for place in range(3)]
    found = [
        personalise_all(TOY, StackedParameters(experts), replays, SEARCH, torch.Generator().manual_seed(0), *choice)
        for choice in ((None, None), everybody)
    ]
    assert all(torch.equal(one.weights, other.weights) for one, other in zip(*found, strict=True))


def test_what_all_mix_is_stacked_before_threads_ask_for_it(experts: list[dict[str, torch.Tensor]]) -> None:
    stacked = StackedParameters(experts)

    def spread(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        assert "matrix" in vars(stacked)
        return [function(item) for item in items]

    with spread_by(spread):
        personalise_all(TOY, stacked, [(0, replay_of({0: 4}))], SEARCH, torch.Generator())
    assert "matrix" not in vars(copy.copy(stacked)), "nor does another process get it beside what it is made of"


def test_the_nearest_are_those_who_met_the_same_classes_in_the_same_shares() -> None:
    met = [{0: 10, 1: 10}, {0: 500, 1: 500}, {2: 5}, {0: 1, 2: 1}, {0: 1, 2: 1}]
    assert nearest(met, 1) == [(1,), (0,), (3,), (4,), (3,)]
    assert nearest(met, 2) == [(1, 3), (0, 3), (3, 4), (0, 4), (0, 3)]
    assert nearest(met, 9)[2] == (0, 1, 3, 4)


def test_a_mixture_takes_of_the_near_alone_and_nobody_stacks_the_others(experts: list[dict[str, torch.Tensor]]) -> None:
    replay = replay_of({2: 12, 3: 12})
    stacked = StackedParameters(experts)
    rng = torch.Generator().manual_seed(0)
    (found,) = personalise_all(TOY, stacked, [(0, replay)], SEARCH, rng, None, [(2,), (0,), (1,)])
    assert found.weights[1].item() == 0.0  # though it alone knows these classes
    assert found.weights.sum().item() == pytest.approx(1.0)
    assert "matrix" not in vars(stacked)


@pytest.mark.parametrize("together", [False, True])
def test_what_one_client_s_mixture_takes_isnt_held_while_others_are_solved_for(
    experts: list[dict[str, torch.Tensor]], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[weakref.ref[StackedParameters]] = []
    held: list[int] = []
    only = StackedParameters.only

    def counted(stacked: StackedParameters, places: Sequence[int]) -> StackedParameters:
        held.append(sum(one() is not None for one in stacks))
        made = only(stacked, places)
        stacks.append(weakref.ref(made))
        return made

    monkeypatch.setattr(StackedParameters, "only", counted)
    monkeypatch.setattr(mixtures, "AT_ONCE", 2)
    replays = [(0, replay_of({0: 4, 1: 4}, seed=seed)) for seed in range(8)]
    short, rng = replace(SEARCH, num_epochs=1), torch.Generator().manual_seed(0)
    personalise_all(TOY, StackedParameters(experts), replays, short, rng, None, [(1,), (0,), (0,)], together=together)
    assert max(held) <= 4  # everybody's, and those of two clients


@pytest.mark.parametrize("search", [SEARCH, replace(SEARCH, num_epochs=12, patience=2), replace(SEARCH, num_epochs=0)])
@pytest.mark.parametrize("near", [None, [(2,), (0,), (1,)]])
def test_clients_at_once_get_what_each_gets_alone(
    experts: list[dict[str, torch.Tensor]], search: WeightSearch, near: list[tuple[int, ...]] | None
) -> None:
    known = [{0: 20, 1: 20}, {2: 20, 3: 20}, {1: 15, 2: 15}]  # the third has fewer
    replays = [(place, replay_of(counts, seed=place)) for place, counts in enumerate(known)]
    replays.append((2, replay_of({0: 20, 3: 20}, seed=9)))
    once, alone = (
        personalise_all(
            TOY, StackedParameters(experts), replays, search, torch.Generator().manual_seed(0), None, near, together=way
        )
        for way in (True, False)
    )
    for one, other in zip(once, alone, strict=True):
        assert torch.allclose(one.weights, other.weights, atol=1e-3)
        assert one.loss == pytest.approx(other.loss, rel=1e-2)


def test_clients_at_once_are_solved_for_in_bfloat16_too(
    experts: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied: list[torch.dtype] = []

    class Noting(precision.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.conv2d:
                multiplied.append(args[1].dtype)
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(precision, "_multiplies_bfloat16", lambda: True)
    replays = [(place, replay_of({0: 4, 2: 4}, seed=place)) for place in range(2)]
    half = replace(SEARCH, num_epochs=1, precision="bfloat16")
    rng = torch.Generator().manual_seed(0)
    with Noting():
        personalise_all(TOY, StackedParameters(experts), replays, half, rng, together=True)
    assert multiplied.count(torch.bfloat16) == multiplied.count(torch.float32) // 3 > 0, (
        "the descent, then three candidates"
    )


def test_a_client_whose_replay_is_nan_spoils_nobody_who_is_solved_for_with_it(
    experts: list[dict[str, torch.Tensor]],
) -> None:
    stacked, good, spoilt = StackedParameters(experts), replay_of({2: 20, 3: 20}), replay_of({0: 20, 1: 20})
    spoilt.images[3, 0, 0, 0] = torch.nan
    jobs = [
        MixtureJob(stacked, place, own, torch.Generator().manual_seed(0)) for place, own in enumerate((good, spoilt))
    ]
    first, second = mixtures_together(TOY, jobs, SEARCH)
    alone = personalised_weights(TOY, stacked, 0, good, SEARCH, torch.Generator().manual_seed(0))
    assert torch.allclose(first.weights, alone.weights, atol=1e-3)
    assert bool(second.weights.isfinite().all())
    assert second.weights.sum().item() == pytest.approx(1)


def test_clients_that_cannot_be_solved_for_at_once_are_solved_for_one_by_one(
    experts: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_spec: object, jobs: Sequence[MixtureJob], _search: WeightSearch) -> list[Mixture]:
        torch.randperm(8, generator=jobs[0].rng)
        raise RuntimeError("vmap: It looks like you're calling .item() on a Tensor")

    monkeypatch.setattr(mixtures, "mixtures_together", fails)
    replays = [(place, replay_of({0: 12, 2: 12}, seed=place)) for place in range(2)]
    once, alone = (
        personalise_all(
            TOY, StackedParameters(experts), replays, SEARCH, torch.Generator().manual_seed(0), together=way
        )
        for way in (True, False)
    )
    assert all(torch.equal(one.weights, other.weights) for one, other in zip(once, alone, strict=True))
    assert "Eq. 3 is solved one by one for 2 clients, for as one it failed: vmap: It looks like" in caplog.text


def test_what_a_failed_attempt_held_is_free_before_clients_are_solved_for_one_by_one(
    experts: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[weakref.ref[StackedParameters]] = []
    held: list[int] = []

    def fails(_spec: object, jobs: Sequence[Any], _search: WeightSearch) -> list[Mixture]:
        attempts.extend(weakref.ref(job.members) for job in jobs)
        raise torch.OutOfMemoryError("CUDA out of memory")

    def alone(*arguments: Any) -> Mixture:
        held.append(sum(one() is not None for one in attempts))
        return personalised_weights(*arguments)

    monkeypatch.setattr(mixtures, "mixtures_together", fails)
    monkeypatch.setattr(mixtures, "personalised_weights", alone)
    replays, near = [(0, replay_of({0: 4, 1: 4}, seed=seed)) for seed in range(3)], [(1,), (0,), (0,)]
    rng = torch.Generator().manual_seed(0)
    personalise_all(TOY, StackedParameters(experts), replays, SEARCH, rng, None, near, together=True)
    assert held == [0, 0, 0]


def test_as_many_clients_are_solved_for_at_once_as_their_models_have_room(
    experts: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def noted(spec: Any, jobs: Sequence[MixtureJob], search: WeightSearch) -> list[Mixture]:
        sizes.append(len(jobs))
        return mixtures_together(spec, jobs, search)

    monkeypatch.setattr(mixtures, "mixtures_together", noted)
    stacked, search = StackedParameters(experts), replace(SEARCH, num_epochs=1)
    monkeypatch.setattr(mixtures, "BYTES_AT_ONCE", 2 * 2 * stacked.num_bytes)  # two clients that mix two each
    replays, near = [(0, replay_of({0: 4, 1: 4}, seed=seed)) for seed in range(4)], [(1,), (0,), (0,)]
    personalise_all(TOY, stacked, replays, search, torch.Generator().manual_seed(0), None, near, together=True)
    assert sizes == [2, 2]
    personalise_all(TOY, stacked, replays, search, torch.Generator().manual_seed(0), together=True)
    assert sizes == [2, 2, 4], "everybody's are held once"
