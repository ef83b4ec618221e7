"""Client halves that wait for their training, alone and in step."""

from __future__ import annotations

import torch

from replayfleet.federation.methods.lockstep import TrainSubGenerators, TrainTaskModel, Work, alone, together
from replayfleet.federation.methods.steps.grouped_task_model import TaskModelJob
from replayfleet.federation.methods.steps.memory import Retraining, train_all
from replayfleet.federation.methods.steps.sub_generators.kinds import WganGp
from replayfleet.federation.methods.steps.task_model import Optimisation
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec

SPEC = TaskSpec(1, 28, ("a", "b"), "cifar", 2)
KIND = WganGp(spec=SPEC, batch_size=4, learning_rate=1e-4, betas=(0.5, 0.9), critic_steps_per_generator_step=1)
OPTIMISATION = Optimisation(num_epochs=1, batch_size=4, learning_rate=0.01, momentum=0.9, weight_decay=0.0)


def half(seed: int, *, num_sub_generators: int, train: bool = True) -> Work[str]:
    """Train a task model, then some sub-generators; report what came back."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.rand(6, 1, 28, 28, generator=rng) * 2 - 1
    bias = torch.zeros(1)
    if train:
        start = initialise(build_task_model(SPEC), rng).state_dict()
        labels = torch.tensor([0, 1] * 3)
        trained = yield TrainTaskModel(SPEC, TaskModelJob(start, images, labels, rng), OPTIMISATION)
        bias = trained["head.bias"]
    work = [Retraining(KIND.new(rng), images, 1 + place % 2, rng) for place in range(num_sub_generators)]
    generators = yield TrainSubGenerators(KIND, work)
    drawn = sum(float(generator.generator["layers.0.weight"].abs().mean()) for generator in generators)
    return f"{seed}: {float(bias.sum()):.4f} {len(generators)} {drawn:.4f}"


def test_clients_in_step_get_what_each_gets_alone_whatever_they_ask_for() -> None:
    def works() -> dict[str, Work[str]]:
        return {
            "b": half(1, num_sub_generators=2),
            "a": half(2, num_sub_generators=0),
            "c": half(3, num_sub_generators=1, train=False),
        }

    in_step = together(works())
    assert list(in_step) == ["b", "a", "c"]
    assert in_step == {client: alone(work) for client, work in works().items()}


def test_no_clients_are_no_work() -> None:
    assert together({}) == {}


def test_sub_generators_of_different_schedules_come_back_in_order_when_trained_as_one() -> None:
    def work() -> list[Retraining]:
        rng = torch.Generator().manual_seed(0)
        images = torch.rand(6, 1, 28, 28, generator=rng) * 2 - 1
        return [Retraining(KIND.new(rng), images, epochs, torch.Generator().manual_seed(epochs)) for epochs in (2, 1)]

    one_by_one, as_one = train_all(KIND, work(), as_one=False), train_all(KIND, work(), as_one=True)
    for left, right in zip(as_one, one_by_one, strict=True):
        for name, tensor in right.generator.items():
            torch.testing.assert_close(left.generator[name], tensor, rtol=1e-3, atol=1e-3)
