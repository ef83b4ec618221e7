"""Real-time streams: which classes and which samples a client meets in every round (section 5.1, appendix A.1).

Every client cuts the K classes into task types of its own and every class's samples into parts of its own. A round
brings one part of each class of one task type, never seen before by this client; the matching test parts join its test
set for good. Two clients may draw the same sample: in the paper each divides the whole set for itself.

Reading of the paper: test data "divided into N_T parts" must mean as many parts as the training data, floor(N / N_T).

Torch-free. All randomness is raw PCG64 output seeded with a digest, which NumPy keeps stable over versions, so a device
and the simulator draw the same stream.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from federation.errors import SettingsError, nearest

Indices: TypeAlias = NDArray[np.int64]

NUM_STAGES = 5
"""Expt. 1 replaces a task type after every floor(T / 5) rounds."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The order in which a client's task types come.

    Attributes:
        task_types: (number of task types, T) -> the task type of each of the T rounds.
        changes: (number of task types, T) -> the rounds at which the mixture changes, for charts.
        change_name: what happens there.
        min_task_types: fewer make no such stream.
    """

    task_types: Callable[[int, int], list[int]]
    changes: Callable[[int, int], list[int]]
    change_name: str
    min_task_types: int = 1


def circulating(num_task_types: int, num_rounds: int) -> list[int]:
    """Expt. 2: all task types in a fixed cycle."""
    return [index % num_task_types for index in range(num_rounds)]


def gradual(num_task_types: int, num_rounds: int) -> list[int]:
    """Expt. 1: two task types alternate; after every floor(T / 5) rounds the next one replaces the earlier one.

    A newcomer takes the place of the one that it replaces, so no task type comes twice running. After the last task
    type the first follows again, so in T = 5 n rounds of five task types each comes n times.
    """
    period = max(1, num_rounds // NUM_STAGES)
    rounds = []
    for index in range(num_rounds):
        stage = index // period
        place = stage if stage % 2 == index % 2 else stage + 1
        rounds.append(place % num_task_types)
    return rounds


def _gradual_changes(_num_task_types: int, num_rounds: int) -> list[int]:
    period = max(1, num_rounds // NUM_STAGES)
    return list(range(period, num_rounds, period))


SCENARIOS: dict[str, Scenario] = {
    "gradual": Scenario(gradual, _gradual_changes, "a new task type replaces the earlier one", min_task_types=2),
    "circulating": Scenario(
        circulating, lambda types, rounds: list(range(types, rounds, types)), "the cycle of task types begins again"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """What defines a stream over a given data set.

    Attributes:
        scenario: a key of ``SCENARIOS``.
        num_clients: the fleet's size; what one client meets doesn't depend on it.
        num_rounds: T; None is the paper's floor(N / (K_T N_T)) K, with N samples in the smallest class, or as many as
            the data last for where that is fewer or none.
        samples_per_class: N_T, training samples of one class in one round.
        test_samples_per_class: joining the test set with them; None is floor(test samples / floor(N / N_T)).
        classes_per_task: K_T.
        seed: of all draws.
    """

    scenario: str
    num_clients: int
    num_rounds: int | None = None
    samples_per_class: int = 200
    test_samples_per_class: int | None = None
    classes_per_task: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            raise SettingsError(f"unknown scenario {self.scenario!r}{nearest(self.scenario, SCENARIOS)}")
        for name in ("num_clients", "num_rounds", "samples_per_class", "test_samples_per_class", "classes_per_task"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name} is {value}, expected at least 1")


class Stream:
    """The rounds of every client of a fleet: values computed from the settings, so any member can recompute its own.

    Attributes:
        settings: with ``num_rounds`` filled in.
        num_rounds: T.
        task_types_per_client: floor(K / K_T).
    """

    def __init__(self, settings: StreamSettings, train_labels: Indices, test_labels: Indices, num_classes: int) -> None:
        """Divide the samples with these labels.

        Args:
            settings: of the stream.
            train_labels: (N,) class ids of the training part.
            test_labels: (M,) class ids of the test part.
            num_classes: K.

        Raises:
            SettingsError: The data don't last for the rounds asked for; says how many are possible.
        """
        self.task_types_per_client = num_classes // settings.classes_per_task
        self._scenario = SCENARIOS[settings.scenario]
        if self.task_types_per_client < self._scenario.min_task_types:
            raise SettingsError(
                f"{num_classes} classes make {self.task_types_per_client} task types of {settings.classes_per_task}, "
                f"scenario {settings.scenario} needs {self._scenario.min_task_types}; lower classes_per_task"
            )
        self.settings = settings
        self._train = [np.flatnonzero(train_labels == class_id) for class_id in range(num_classes)]
        self._test = [np.flatnonzero(test_labels == class_id) for class_id in range(num_classes)]
        self._test_size, self._num_parts = self._divide()
        self.num_rounds = self._checked_num_rounds()
        self.settings = dataclasses.replace(settings, num_rounds=self.num_rounds)

    def class_ids(self, client: int, round_index: int) -> tuple[int, ...]:
        """The classes that a client meets in a round, rising."""
        return self._task_types(client)[self._order[round_index]]

    def train_indices(self, client: int, round_index: int) -> Indices:
        """Training samples of one round, (K_T x N_T,) indices into the training part, classes mixed."""
        part, size = self._part(round_index), self.settings.samples_per_class
        indices = np.concatenate(
            [
                self._shuffled(self._train[class_id], client, f"train/{class_id}")[part * size : (part + 1) * size]
                for class_id in self.class_ids(client, round_index)
            ]
        )
        return self._shuffled(indices, client, f"round/{round_index}")

    def test_indices(self, client: int, round_index: int) -> Indices:
        """The client's cumulative test set after a round: the test parts of all rounds so far, in their order."""
        return np.concatenate([self._new_test_indices(client, earlier) for earlier in range(round_index + 1)])

    def num_seen(self, round_index: int) -> int:
        """n_i^t of Eq. 4: training samples that a client has met after a round (equal for all clients)."""
        return (round_index + 1) * self.settings.samples_per_class * self.settings.classes_per_task

    def changes(self) -> list[int]:
        """The rounds at which every client's mixture of task types changes."""
        return self._scenario.changes(self.task_types_per_client, self.num_rounds)

    @property
    def change_name(self) -> str:
        """What happens at ``changes``."""
        return self._scenario.change_name

    @functools.cached_property
    def _order(self) -> list[int]:
        return self._scenario.task_types(self.task_types_per_client, self.num_rounds)

    def _part(self, round_index: int) -> int:
        return self._order[:round_index].count(self._order[round_index])

    def _new_test_indices(self, client: int, round_index: int) -> Indices:
        part = self._part(round_index)
        return np.concatenate(
            [
                self._shuffled(self._test[class_id], client, f"test/{class_id}")[part * size : (part + 1) * size]
                for class_id in self.class_ids(client, round_index)
                for size in (self._test_size[class_id],)
            ]
        )

    def _task_types(self, client: int) -> list[tuple[int, ...]]:
        """The client's task types in the order of their first coming."""
        classes = self._shuffled(np.arange(len(self._train)), client, "task-types").tolist()
        width = self.settings.classes_per_task
        return [tuple(sorted(classes[i * width : (i + 1) * width])) for i in range(self.task_types_per_client)]

    def _shuffled(self, indices: Indices, client: int, what: str) -> Indices:
        digest = hashlib.sha256(f"{self.settings.seed}/client-{client}/{what}".encode()).digest()
        return indices[
            np.argsort(np.random.PCG64(int.from_bytes(digest[:16], "big")).random_raw(len(indices)), kind="stable")
        ]

    def _divide(self) -> tuple[list[int], list[int]]:
        """Per class: test samples of one part, and how many parts both its training and test samples yield."""
        sizes, parts = [], []
        for class_id, (train, test) in enumerate(zip(self._train, self._test, strict=True)):
            num_parts = len(train) // self.settings.samples_per_class
            size = self.settings.test_samples_per_class or (len(test) // num_parts if num_parts else 0)
            if num_parts and not size:
                raise SettingsError(
                    f"class {class_id} has {len(test)} test samples for {num_parts} parts; "
                    "raise samples_per_class, or set test_samples_per_class"
                )
            sizes.append(size)
            parts.append(min(num_parts, len(test) // size) if size else 0)
        return sizes, parts

    def _checked_num_rounds(self) -> int:
        quotas = [
            [min(self._num_parts[class_id] for class_id in task_type) for task_type in self._task_types(client)]
            for client in range(self.settings.num_clients)
        ]
        wanted = self.settings.num_rounds
        if wanted is not None and self._lasts(wanted, quotas):
            return wanted
        upper = min(sum(quota) for quota in quotas)
        if wanted is None:
            upper = min(upper, self._paper_num_rounds() or upper)
        possible = next((rounds for rounds in range(upper, 0, -1) if self._lasts(rounds, quotas)), 0)
        if wanted is None and possible:
            return possible
        raise SettingsError(
            f"scenario {self.settings.scenario} with {self.settings.samples_per_class} training samples per class and "
            f"round lasts for {possible} rounds on this data, not for {wanted or 'any'}; "
            f"ask for fewer rounds, or lower {' or '.join(self._quota_names())}"
        )

    def _paper_num_rounds(self) -> int:
        """T of appendix A.2: 150 for Fashion-MNIST, 120 for CIFAR-10, whose parts would last for 125."""
        samples_per_task_type = self.settings.classes_per_task * self.settings.samples_per_class
        return min(len(train) for train in self._train) // samples_per_task_type * len(self._train)

    def _quota_names(self) -> list[str]:
        names = ["samples_per_class", "test_samples_per_class"]
        return names if self.settings.test_samples_per_class else names[:1]

    def _lasts(self, num_rounds: int, quotas: Sequence[Sequence[int]]) -> bool:
        order = self._scenario.task_types(self.task_types_per_client, num_rounds)
        needed = np.bincount(order, minlength=self.task_types_per_client)
        return all(bool((needed <= np.asarray(quota)).all()) for quota in quotas)


def client_id(index: int) -> str:
    """Return the name of the client with this index, in simulations and demos."""
    return f"client-{index}"
