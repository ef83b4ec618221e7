"""Real-time streams: which classes and which samples a client meets in every round (section 5.1, appendix A.1).

Every client cuts the K classes into task types of its own and every class's samples into parts of its own. A round
brings one part of each class of one task type, never seen before by this client; the matching test parts join its test
set for good. Two clients may draw the same sample: in the paper each divides the whole set for itself.

Readings of the paper:

1. Test data "divided into N_T parts" must mean as many parts as the training data, floor(N / N_T).
2. With ``overlap`` (appendix C.3) a client's classes lie on a ring in its own order; task type i begins at place i K_T
   and has K_T + overlap classes, so that neighbours share exactly ``overlap``. A class then belongs to several task
   types, and each round that brings it takes the next of its parts.
3. The task of a round passes absent clients by (appendix C.4): they never meet its parts, neither for training nor for
   testing, so what a client meets in the other rounds doesn't depend on absences. All take part in round 0.

Torch-free. All randomness is raw PCG64 output seeded with a digest, which NumPy keeps stable over versions, so a device
and the simulator draw the same stream.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError, nearest

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
        one_cycle: T is the number of task types, unless the operator asks for another.
    """

    task_types: Callable[[int, int], list[int]]
    changes: Callable[[int, int], list[int]]
    change_name: str
    min_task_types: int = 1
    one_cycle: bool = False


def circulating(num_task_types: int, num_rounds: int) -> list[int]:
    """Expt. 2: all task types in a fixed cycle. Expt. 3 (``extreme``) ends after one."""
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


def _circulating_changes(num_task_types: int, num_rounds: int) -> list[int]:
    return list(range(num_task_types, num_rounds, num_task_types))


_CYCLE = "the cycle of task types begins again"

SCENARIOS: dict[str, Scenario] = {
    "gradual": Scenario(gradual, _gradual_changes, "a new task type replaces the earlier one", min_task_types=2),
    "circulating": Scenario(circulating, _circulating_changes, _CYCLE),
    "extreme": Scenario(circulating, _circulating_changes, _CYCLE, one_cycle=True),
}

DRIVING = "driving"
"""A scenario without task types, ``federation.streams.driving.stream``, whose settings are these all the same."""

ROTATED, PERMUTED, SEQUENTIAL, FEW_SHOT = TASK_BY_TASK = ("rotated", "permuted", "sequential", "few-shot")
"""Scenarios of tasks that last for several rounds, ``federation.streams.tasks``; likewise."""

SPLITS = ("evenly", "two-classes", "dirichlet")
"""How a task's samples are split over the clients there."""

_ONLY_IN: tuple[tuple[Sequence[str], str, Sequence[str]], ...] = (
    (tuple(SCENARIOS), "task types", ("classes_per_task", "overlap")),
    (TASK_BY_TASK, "tasks that last", ("num_tasks", "rounds_per_task", "split", "dirichlet_alpha")),
    ((FEW_SHOT,), "base session", ("base_classes", "base_rounds", "shots")),
)
"""Scenarios, what no other has, and its settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSize:
    """How large a stream is.

    Attributes:
        num_clients: the fleet's size; what one client meets doesn't depend on it.
        num_rounds: T; None is the paper's floor(N / ((K_T + overlap) N_T)) K, with N samples in the smallest class
            (of ``extreme``: the number of task types), or as many as the data last for where that is fewer or none.
        samples_per_class: N_T, training samples of one class in one round.
        test_samples_per_class: joining the test set with them; None is floor(test samples / floor(N / N_T)), 0 as many
            as there are for all rounds: a class's whole test set by its last one. Then ``num_rounds`` must be given.
        classes_per_task: K_T.
        overlap: classes that adjacent task types share, on top of K_T: at most those of all task types but two.
        num_absent: clients that miss each round but the first.
        late_town: of scenario ``DRIVING``: where the first client alone gets to in the last rounds; "" is nowhere.
        late_rounds: how many those are; None is a seventh, as FedGP's rounds 60 to 69 of 70.
        num_tasks: of scenarios ``TASK_BY_TASK``, in which ``samples_per_class`` and ``test_samples_per_class`` are
            those of a task in the whole fleet, as many as there are where there are fewer; likewise the next three.
        rounds_per_task: R.
        split: one of ``SPLITS``.
        dirichlet_alpha: of the Dirichlet distribution; smaller is more unequal.
        stagger: rounds by which each client's task may begin earlier or later than the others'.
        base_classes: of scenario ``FEW_SHOT``: those of its first task, which is split evenly.
        base_rounds: of that, the rounds of its first task.
        shots: of that, training samples of one class of a later task in the whole fleet.
    """

    num_clients: int
    num_rounds: int | None = None
    samples_per_class: int = 200
    test_samples_per_class: int | None = None
    classes_per_task: int = 2
    overlap: int = 0
    num_absent: int = 0
    late_town: str = ""
    late_rounds: int | None = None
    num_tasks: int = 5
    rounds_per_task: int = 4
    split: str = "two-classes"
    dirichlet_alpha: float = 0.3
    stagger: int = 0
    base_classes: int = 6
    base_rounds: int = 4
    shots: int = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings(StreamSize):
    """What defines a stream over a given data set.

    Attributes:
        scenario: a key of ``SCENARIOS``, ``DRIVING``, or one of ``TASK_BY_TASK``.
        seed: of all draws.
    """

    scenario: str
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_scenario()
        for name in (
            "num_clients",
            "num_rounds",
            "samples_per_class",
            "test_samples_per_class",
            "classes_per_task",
            "late_rounds",
            "num_tasks",
            "rounds_per_task",
            "base_classes",
            "base_rounds",
            "shots",
        ):
            value = getattr(self, name)
            least = 0 if name == "test_samples_per_class" else 1
            if value is not None and value < least:
                raise SettingsError(f"{name} is {value}, expected at least {least}")
        if self.test_samples_per_class == 0 and self.scenario not in SCENARIOS:
            raise SettingsError(
                f"test_samples_per_class is 0, which scenario {self.scenario} doesn't know; give a number"
            )
        if self.split not in SPLITS:
            raise SettingsError(f"unknown split {self.split!r}{nearest(self.split, SPLITS)}")
        if not 0.01 <= self.dirichlet_alpha <= 1000:
            raise SettingsError(f"dirichlet_alpha is {self.dirichlet_alpha}, expected 0.01 to 1000")
        if self.overlap < 0:
            raise SettingsError(f"overlap is {self.overlap}, expected 0 or more")
        if not 0 <= self.num_absent < self.num_clients:
            raise SettingsError(
                f"num_absent is {self.num_absent}, expected 0 to {self.num_clients - 1}: "
                f"one of {self.num_clients} clients must take part in every round"
            )

    def _check_scenario(self) -> None:
        known = (*SCENARIOS, DRIVING, *TASK_BY_TASK)
        if self.scenario not in known:
            raise SettingsError(f"unknown scenario {self.scenario!r}{nearest(self.scenario, known)}")
        if self.late_town and self.scenario != DRIVING:
            raise SettingsError(
                f"late_town is {self.late_town!r}, but scenario {self.scenario} has no towns; leave it out"
            )
        if self.late_rounds is not None and not self.late_town:
            raise SettingsError(
                f"late_rounds is {self.late_rounds}, but no late_town is named; name one, or leave it out"
            )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for scenarios, what, names in _ONLY_IN:
            for name in names if self.scenario not in scenarios else ():
                if (value := getattr(self, name)) != defaults[name]:
                    raise SettingsError(f"{name} is {value}, but scenario {self.scenario} has no {what}; leave it out")
        if self.stagger and (self.stagger < 0 or self.scenario not in TASK_BY_TASK):
            raise SettingsError(f"stagger is {self.stagger}, expected 0, or rounds of a scenario whose tasks last")


def plain_settings(settings: StreamSettings) -> dict[str, Any]:
    """Return settings as JSON values, as runs are known by: of a late town, or of tasks, only where there are."""
    plain = dataclasses.asdict(settings)
    if not settings.late_town:
        del plain["late_town"], plain["late_rounds"]
    plain["alpha"] = plain.pop("dirichlet_alpha")  # its name when the first of these runs were made
    if settings.scenario not in TASK_BY_TASK:
        del plain["num_tasks"], plain["rounds_per_task"], plain["split"], plain["alpha"]
    if not settings.stagger:
        del plain["stagger"]
    if settings.scenario != FEW_SHOT:
        del plain["base_classes"], plain["base_rounds"], plain["shots"]
    return plain


class Stream:
    """The rounds of every client of a fleet: values computed from the settings, so any member can recompute its own.

    Attributes:
        settings: with ``num_rounds`` filled in.
        num_rounds: T.
        task_types_per_client: floor(K / K_T).
    """

    def __init__(
        self,
        settings: StreamSettings,
        train_labels: Indices,
        test_labels: Indices,
        num_classes: int,
        class_names: Sequence[str] = (),
    ) -> None:
        """Divide the samples with these labels.

        Args:
            settings: of the stream.
            train_labels: (N,) class ids of the training part.
            test_labels: (M,) class ids of the test part.
            num_classes: K.
            class_names: what errors call them; their numbers without.

        Raises:
            SettingsError: The data don't last for the rounds asked for; says how many are possible.
        """
        if settings.scenario not in SCENARIOS:
            raise SettingsError(
                f"scenario {settings.scenario!r} has no task types, so only a simulation of driving can run it "
                f"(fleet-sim); expected one of {', '.join(SCENARIOS)}"
            )
        self._class_names = [repr(name) for name in class_names] or [str(class_id) for class_id in range(num_classes)]
        self.task_types_per_client = num_classes // settings.classes_per_task
        self._scenario = SCENARIOS[settings.scenario]
        if self.task_types_per_client < self._scenario.min_task_types:
            raise SettingsError(
                f"{num_classes} classes make {self.task_types_per_client} task types of {settings.classes_per_task}, "
                f"scenario {settings.scenario} needs {self._scenario.min_task_types}; lower classes_per_task"
            )
        self._check_overlap(settings, num_classes)
        self.settings = settings
        self._train = [np.flatnonzero(train_labels == class_id) for class_id in range(num_classes)]
        self._test = [np.flatnonzero(test_labels == class_id) for class_id in range(num_classes)]
        self._test_size, self._num_parts = self._divide()
        self._met_by: dict[int, list[dict[int, int]]] = {}
        self._new_tests: dict[tuple[int, int], Indices] = {}
        self.num_rounds = self._checked_num_rounds()
        self.settings = dataclasses.replace(settings, num_rounds=self.num_rounds)

    def present(self, round_index: int) -> tuple[int, ...]:
        """The clients that take part in a round, rising."""
        absent = self._absent[round_index]
        return tuple(client for client in range(self.settings.num_clients) if client not in absent)

    def class_ids(self, client: int, round_index: int) -> tuple[int, ...]:
        """The classes that a client meets in a round, rising; none if it is absent."""
        return tuple(self._met(client)[round_index])

    def train_indices(self, client: int, round_index: int) -> Indices:
        """Training samples of one round, ((K_T + overlap) N_T,) indices into the training part, classes mixed."""
        size = self.settings.samples_per_class
        pieces = [
            self._shuffled(self._train[class_id], client, f"train/{class_id}")[part * size : (part + 1) * size]
            for class_id, part in self._met(client)[round_index].items()
        ]
        return self._shuffled(joined(pieces), client, f"round/{round_index}")

    def test_indices(self, client: int, round_index: int) -> Indices:
        """The client's cumulative test set after a round: the test parts of all rounds so far, in their order."""
        return joined([self._new_test_indices(client, earlier) for earlier in range(round_index + 1)])

    def num_seen(self, client: int, round_index: int) -> int:
        """n_i^t of Eq. 4: training samples that a client has met after a round."""
        missed = sum(client in absent for absent in self._absent[: round_index + 1])
        return (round_index + 1 - missed) * self.settings.samples_per_class * self._classes_per_round

    def changes(self) -> list[int]:
        """The rounds at which every client's mixture of task types changes."""
        return self._scenario.changes(self.task_types_per_client, self.num_rounds)

    @property
    def change_name(self) -> str:
        """What happens at ``changes``."""
        return self._scenario.change_name

    def described(self) -> dict[str, Any]:
        """Return what results say of the stream, as JSON values."""
        return {"changes": self.changes(), "change_name": self.change_name}

    @property
    def _classes_per_round(self) -> int:
        return self.settings.classes_per_task + self.settings.overlap

    @functools.cached_property
    def _order(self) -> list[int]:
        return self._scenario.task_types(self.task_types_per_client, self.num_rounds)

    @functools.cached_property
    def _absent(self) -> list[frozenset[int]]:
        """Per round: the clients that miss it."""
        return absences(self.settings, self.num_rounds)

    def _new_test_indices(self, client: int, round_index: int) -> Indices:
        known = self._new_tests.get((client, round_index))
        if known is None:
            pieces = [
                self._shuffled(self._test[class_id], client, f"test/{class_id}")[part * size : (part + 1) * size]
                for class_id, part in self._met(client)[round_index].items()
                for size in (self._test_size[class_id],)
            ]
            known = self._new_tests[client, round_index] = joined(pieces)
        return known

    def _met(self, client: int) -> list[dict[int, int]]:
        """Per round: class id, rising -> which of its parts the client meets, counted over all earlier rounds."""
        if client not in self._met_by:
            self._met_by[client] = self._parts_met(client)
        return self._met_by[client]

    def _parts_met(self, client: int) -> list[dict[int, int]]:
        task_types = self._task_types(client)
        num_past: Counter[int] = Counter()
        rounds: list[dict[int, int]] = []
        for task_type, absent in zip(self._order, self._absent, strict=True):
            classes = task_types[task_type]
            rounds.append({} if client in absent else {class_id: num_past[class_id] for class_id in classes})
            num_past.update(classes)
        return rounds

    def _task_types(self, client: int) -> list[tuple[int, ...]]:
        """The client's task types in the order of their first coming."""
        classes = self._shuffled(np.arange(len(self._train)), client, "task-types").tolist()
        width, num_task_types = self.settings.classes_per_task, self.task_types_per_client
        ring = classes[: width * num_task_types] * 2
        return [tuple(sorted(ring[i * width : i * width + self._classes_per_round])) for i in range(num_task_types)]

    def _shuffled(self, indices: Indices, client: int, what: str) -> Indices:
        return shuffled(indices, self.settings.seed, f"client-{client}/{what}")

    def _divide(self) -> tuple[list[int], list[int]]:
        """Per class: test samples of one part, and how many parts both its training and test samples yield."""
        sizes, parts = [], []
        spread = self.settings.test_samples_per_class == 0
        for class_id, (train, test) in enumerate(zip(self._train, self._test, strict=True)):
            num_parts = len(train) // self.settings.samples_per_class
            num_tests = min(num_parts, self._most_visits()) if spread else num_parts
            size = self.settings.test_samples_per_class or (len(test) // num_tests if num_tests else 0)
            if num_parts and not size:
                raise SettingsError(
                    f"class {self._class_names[class_id]} has {len(test)} test samples for {num_parts} parts; "
                    "raise samples_per_class, or set test_samples_per_class"
                )
            sizes.append(size)
            parts.append(min(num_parts, len(test) // size) if size else 0)
        return sizes, parts

    def _most_visits(self) -> int:
        """In how many rounds of the run the same class can come to one client, at most."""
        if self.settings.num_rounds is None:
            raise SettingsError("test_samples_per_class is 0, all over the run's rounds; say how many with num_rounds")
        order = self._scenario.task_types(self.task_types_per_client, self.settings.num_rounds)
        types_of_a_class = -(-self._classes_per_round // self.settings.classes_per_task)
        return sum(sorted(np.bincount(order).tolist())[-types_of_a_class:])

    def _check_overlap(self, settings: StreamSettings, num_classes: int) -> None:
        most = max(0, self.task_types_per_client - 2) * settings.classes_per_task
        if settings.overlap > most:
            raise SettingsError(
                f"overlap is {settings.overlap}, expected at most {most}: with {num_classes} classes and "
                f"{settings.classes_per_task} classes_per_task, neighbours would share more than that"
            )

    def _checked_num_rounds(self) -> int:
        task_types = [self._task_types(client) for client in range(self.settings.num_clients)]
        wanted = self.settings.num_rounds
        quotas = [[min(self._num_parts[c] for c in classes) for classes in own] for own in task_types]
        upper = min(sum(quota) for quota in quotas)
        if wanted is not None and wanted <= upper and self._lasts(wanted, task_types):
            return wanted
        upper = min(upper, wanted or self._paper_num_rounds() or upper)  # more may do, of ``gradual``
        possible = next((rounds for rounds in range(upper, 0, -1) if self._lasts(rounds, task_types)), 0)
        if wanted is None and possible:
            return possible
        too_few = [class_id for class_id, num_parts in enumerate(self._num_parts) if not num_parts]
        what_then = f"class {self._class_names[too_few[0]]} has too few for one" if too_few else "ask for fewer rounds"
        raise SettingsError(
            f"scenario {self.settings.scenario} with {self.settings.samples_per_class} training samples per class and "
            f"round lasts for {possible} rounds on this data, not for {wanted or 'any'}; "
            f"{what_then}, {'so' if too_few else 'or'} lower {' or '.join(self._quota_names())}"
        )

    def _paper_num_rounds(self) -> int:
        """T of appendix A.2: 150 for Fashion-MNIST, 120 for CIFAR-10, whose parts would last for 125."""
        if self._scenario.one_cycle:
            return self.task_types_per_client
        samples_per_task_type = self._classes_per_round * self.settings.samples_per_class
        return min(len(train) for train in self._train) // samples_per_task_type * len(self._train)

    def _quota_names(self) -> list[str]:
        names = ["samples_per_class", "test_samples_per_class"]
        return names if self.settings.test_samples_per_class else names[:1]

    def _lasts(self, num_rounds: int, task_types: Sequence[Sequence[tuple[int, ...]]]) -> bool:
        """Whether every class has a part for every round that brings it, for each client's task types."""
        order = self._scenario.task_types(self.task_types_per_client, num_rounds)
        num_rounds_of = np.bincount(order, minlength=self.task_types_per_client)
        for own in task_types:
            needed = np.zeros(len(self._num_parts), dtype=np.int64)
            np.add.at(needed, np.asarray(own), num_rounds_of[:, None])
            if not (needed <= np.asarray(self._num_parts)).all():
                return False
        return True


def shuffled(indices: Indices, seed: int, what: str) -> Indices:
    """Return the indices in an order that depends on the seed and on what it is drawn for."""
    return indices[np.argsort(_raw(seed, what).random_raw(len(indices)), kind="stable")]


def uniform(seed: int, what: str) -> Iterator[float]:
    """Yield numbers from U[0, 1) that depend on the seed and on what they are drawn for."""
    raw = _raw(seed, what)
    while True:
        yield (int(raw.random_raw()) >> 11) * 2.0**-53


def _raw(seed: int, what: str) -> np.random.PCG64:
    digest = hashlib.sha256(f"{seed}/{what}".encode()).digest()
    return np.random.PCG64(int.from_bytes(digest[:16], "big"))


def absences(settings: StreamSettings, num_rounds: int) -> list[frozenset[int]]:
    """Return, per round, the clients that miss it: nobody the first."""
    everybody = np.arange(settings.num_clients)
    return [
        frozenset(shuffled(everybody, settings.seed, f"absent/{index}")[: settings.num_absent if index else 0].tolist())
        for index in range(num_rounds)
    ]


def joined(pieces: Sequence[Indices]) -> Indices:
    """Return all pieces behind each other; no pieces, no indices."""
    return np.concatenate([np.empty(0, dtype=np.int64), *pieces])


def client_id(index: int) -> str:
    """Return the name of the client with this index, in simulations and demos."""
    return f"client-{index}"
