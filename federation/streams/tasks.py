"""Tasks one after the other, each for R rounds on the same samples: the streams of FedGP's, MFCL's and TARGET's tables.

``rotated`` and ``permuted`` show the same images of all classes in every task, turned by an angle or with pixels in
another order (domain-incremental; Lopez-Paz & Ranzato 2017, Goodfellow et al. 2013). ``sequential`` brings new classes
with every task (class-incremental), and so does ``few-shot``, whose first task, the base session, has most classes and
all of their samples, and whose later ones have a few samples of each new class (SDD's N-way K-shot sessions).

A task's samples are split over the clients once; a client trains on its share in each of the R rounds. Every client
tests an equal share of each task's test images, so that the fleet's accuracy after a task is the mean over all tasks so
far (FedGP's Acc_t), where all serve one model and tasks are alike.

Axes: N images of the set, T tasks.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.datasets import Dataset
from replayfleet.federation.streams.labelled_images import LabelledImages, ShownImages
from replayfleet.federation.streams.stream import (
    FEW_SHOT,
    PERMUTED,
    ROTATED,
    SEQUENTIAL,
    Indices,
    StreamSettings,
    absences,
    joined,
    shuffled,
    uniform,
)

MIN_SHARE = 10
"""Samples of a task that every client has at least; shares are drawn anew until it is so, as in FedGP's code."""
MIN_SHOTS = 2
"""Likewise in a session of ``few-shot``: fewer train nothing."""
MAX_DRAWS = 1000

_NEW_CLASSES = (SEQUENTIAL, FEW_SHOT)
"""Whose tasks bring other classes, rather than the same ones shown otherwise."""

Pixels = NDArray[np.uint8]


def as_tasks_show_it(settings: StreamSettings, data: Dataset) -> Dataset:
    """Return a data set whose images are those that the stream's tasks show; itself if they show them as they are."""
    if settings.scenario == ROTATED:
        draw: Callable[[int], Callable[[Pixels], Pixels]] = lambda task: _turned(_angle(settings, task))  # noqa: E731
    elif settings.scenario == PERMUTED:
        draw = lambda task: _mixed(settings, task, data.task.image_size**2)  # noqa: E731
    else:
        return data
    show = tuple(draw(task) for task in range(settings.num_tasks))
    return dataclasses.replace(data, train=_all_tasks(data.train, show), test=_all_tasks(data.test, show))


def _all_tasks(part: LabelledImages, show: tuple[Callable[[Pixels], Pixels], ...]) -> LabelledImages:
    return LabelledImages(ShownImages(part.images, show), np.tile(part.labels, len(show)), part.class_names)


def _angle(settings: StreamSettings, task: int) -> float:
    """In degrees, uniform between 0 and 180."""
    return 180.0 * next(uniform(settings.seed, f"task-{task}/angle"))


def _turned(angle: float) -> Callable[[Pixels], Pixels]:
    """Return what turns images about their centre, with bilinear interpolation; what comes from outside is 0."""

    def turn(images: Pixels) -> Pixels:
        height, width = images.shape[1:3]
        cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        y, x = np.mgrid[:height, :width] - np.array([(height - 1) / 2, (width - 1) / 2])[:, None, None]
        rows, columns = cosine * y - sine * x + (height - 1) / 2, sine * y + cosine * x + (width - 1) / 2
        top, left = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
        turned = np.zeros(images.shape, dtype=np.float64)
        for row, down in ((top, 1 - (rows - top)), (top + 1, rows - top)):
            for column, right in ((left, 1 - (columns - left)), (left + 1, columns - left)):
                inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
                weight = np.where(inside, down * right, 0.0)[None, :, :, None]
                turned += weight * images[:, np.clip(row, 0, height - 1), np.clip(column, 0, width - 1)]
        return np.rint(turned).astype(np.uint8)

    return turn


def _mixed(settings: StreamSettings, task: int, num_pixels: int) -> Callable[[Pixels], Pixels]:
    """Return what puts the pixels of images in the order of a task; the first task leaves them."""
    order = np.arange(num_pixels)
    if task:
        order = shuffled(order, settings.seed, f"task-{task}/pixels")

    def mix(images: Pixels) -> Pixels:
        flat = images.reshape(len(images), num_pixels, -1)[:, order]
        return flat.reshape(images.shape)

    return mix


class TaskStream:
    """The rounds of every client; ``Stream``'s interface, with a place for each task.

    Attributes:
        settings: with ``num_rounds`` filled in.
        num_rounds: T R, or fewer if so many were asked for.
        place_names: of the tasks.
    """

    change_name = "a new task begins"

    def __init__(self, settings: StreamSettings, data: Dataset) -> None:
        """Split the samples of a data set, before ``as_tasks_show_it``.

        Raises:
            SettingsError: The classes don't make so many tasks, or the samples don't suffice for the clients.
        """
        self.settings = settings
        self._ends = self._last_rounds()
        if 2 * settings.stagger >= min(settings.rounds_per_task, self._ends[0]):
            raise SettingsError(
                f"stagger is {settings.stagger}, but a task lasts for {min(settings.rounds_per_task, self._ends[0])} "
                "rounds; expected less than half of that"
            )
        most = self._ends[-1]
        self.num_rounds = settings.num_rounds or most
        if self.num_rounds > most:
            raise SettingsError(
                f"{settings.num_tasks} tasks last for {most} rounds, not {self.num_rounds}; "
                "raise num_tasks or rounds_per_task"
            )
        self.settings = dataclasses.replace(settings, num_rounds=self.num_rounds)
        self._absent = absences(settings, self.num_rounds)
        self._labels = (data.train.labels, data.test.labels)
        self._num_classes = data.task.num_classes
        self._classes = self._classes_by_task(self._num_classes)
        self.place_names = tuple(self._name(task, data) for task in range(settings.num_tasks))
        self._train = [self._split_train(task) for task in range(settings.num_tasks)]
        self._test = [self._split_test(task) for task in range(settings.num_tasks)]

    def present(self, round_index: int) -> tuple[int, ...]:
        """The clients that take part in a round, rising."""
        absent = self._absent[round_index]
        return tuple(client for client in range(self.settings.num_clients) if client not in absent)

    def class_ids(self, client: int, round_index: int) -> tuple[int, ...]:
        """The classes that a client trains on in a round, rising; none if it is absent."""
        labels = self._labels[0]
        return tuple(np.unique(labels[self.train_indices(client, round_index) % len(labels)]).tolist())

    def train_indices(self, client: int, round_index: int) -> Indices:
        """Training samples of one round, the same in all rounds of a task, classes mixed."""
        if client in self._absent[round_index]:
            return np.empty(0, dtype=np.int64)
        return self._train[self._task(client, round_index)][client]

    def test_indices(self, client: int, round_index: int) -> Indices:
        """The client's share of the test images of all tasks so far."""
        return joined([self._test[task][client] for task in range(self._task(client, round_index) + 1)])

    def test_places(self, client: int, round_index: int) -> Indices:
        """The task of each of ``test_indices``."""
        lengths = [len(self._test[task][client]) for task in range(self._task(client, round_index) + 1)]
        return np.repeat(np.arange(len(lengths)), lengths)

    def classes_of_task(self, client: int, round_index: int) -> NDArray[np.bool_] | None:
        """The classes of each of ``test_indices``' task, (M, K); None where all tasks have the same."""
        if self.settings.scenario not in _NEW_CLASSES:
            return None
        named = np.zeros((len(self._classes), self._num_classes), dtype=np.bool_)
        for task, classes in enumerate(self._classes):
            named[task, classes.start : classes.stop] = True
        return named[self.test_places(client, round_index)]

    def num_seen(self, client: int, round_index: int) -> int:
        """Training samples that a client has met after a round, each counted once."""
        rounds = [index for index in range(round_index + 1) if client not in self._absent[index]]
        return sum(len(self._train[task][client]) for task in {self._task(client, index) for index in rounds})

    def changes(self) -> list[int]:
        """The rounds at which a new task begins."""
        return [end for end in self._ends if end < self.num_rounds]

    def described(self) -> dict[str, Any]:
        """Return what results say of the stream, as JSON values."""
        described = {"changes": self.changes(), "change_name": self.change_name, "tasks": list(self.place_names)}
        if self.settings.scenario == ROTATED:
            described["angles"] = [_angle(self.settings, task) for task in range(self.settings.num_tasks)]
        return described

    def _task(self, client: int, round_index: int) -> int:
        return bisect.bisect_right(self._ends_of(client), round_index)

    def _ends_of(self, client: int) -> list[int]:
        """As ``_last_rounds``, of one client, whose borders but the last are drawn up to ``stagger`` rounds away."""
        stagger = self.settings.stagger
        if not stagger:
            return self._ends
        drawn = uniform(self.settings.seed, f"client-{client}/borders")
        away = [math.floor((2 * stagger + 1) * next(drawn)) - stagger for _ in self._ends[:-1]]
        return [*(end + shift for end, shift in zip(self._ends, away, strict=False)), self._ends[-1]]

    def _last_rounds(self) -> list[int]:
        """Per task: the round at which the next one begins."""
        settings = self.settings
        first = settings.base_rounds if settings.scenario == FEW_SHOT else settings.rounds_per_task
        return [first + task * settings.rounds_per_task for task in range(settings.num_tasks)]

    def _name(self, task: int, data: Dataset) -> str:
        if self.settings.scenario in _NEW_CLASSES:
            return f"task {task + 1}: {', '.join(data.task.class_names[c] for c in self._classes[task])}"
        return f"task {task + 1}"

    def _classes_by_task(self, num_classes: int) -> list[range]:
        tasks = self.settings.num_tasks
        if self.settings.scenario not in _NEW_CLASSES:
            return [range(num_classes)] * tasks
        base = self.settings.base_classes if self.settings.scenario == FEW_SHOT else 0
        later = tasks - 1 if base else tasks
        if num_classes - base < 2 * later:
            raise SettingsError(
                f"{num_classes} classes don't make {f'{base} base classes and ' if base else ''}{later} tasks of at "
                f"least 2; lower num_tasks{' or base_classes' if base else ''}"
            )
        bounds = [base + (num_classes - base) * task // max(1, later) for task in range(later + 1)]
        return [*([range(base)] if base else []), *(range(first, last) for first, last in itertools.pairwise(bounds))]

    def _samples(self, part: int, task: int, per_class: int | None) -> list[Indices]:
        """Per class of a task: its samples in this part; the same ones in all tasks that only show them otherwise."""
        labels, offset = self._labels[part], 0
        if self.settings.scenario not in _NEW_CLASSES:
            offset = task * len(labels)
        found = []
        for class_id in self._classes[task]:
            all_of_it = shuffled(np.flatnonzero(labels == class_id), self.settings.seed, f"part-{part}/{class_id}")
            found.append(all_of_it[:per_class] + offset)
        return found

    def _split_train(self, task: int) -> list[Indices]:
        settings = self.settings
        few = settings.scenario == FEW_SHOT and task > 0
        by_class = self._samples(0, task, settings.shots if few else settings.samples_per_class)
        split = _SPLITS["evenly" if settings.scenario == FEW_SHOT and not few else settings.split]
        least = MIN_SHOTS if few else MIN_SHARE
        shown_again = task if settings.scenario in _NEW_CLASSES else 0  # the same split of the same images
        for attempt in range(MAX_DRAWS):
            what = f"split-{shown_again}/{attempt}"
            shares = split(by_class, settings, what)
            if min(map(len, shares)) >= least:
                return [shuffled(share, settings.seed, f"client-{i}/task-{task}") for i, share in enumerate(shares)]
        raise SettingsError(
            f"{sum(map(len, by_class))} samples of a task don't give each of {settings.num_clients} clients {least}; "
            f"raise {'shots' if few else 'samples_per_class'} or dirichlet_alpha, or lower the number of clients"
        )

    def _split_test(self, task: int) -> list[Indices]:
        every = joined(self._samples(1, task, self.settings.test_samples_per_class))
        mixed = shuffled(every, self.settings.seed, f"test/task-{task}")
        shares = [mixed[client :: self.settings.num_clients] for client in range(self.settings.num_clients)]
        if not len(shares[-1]):
            raise SettingsError(f"{len(every)} test samples of a task for {len(shares)} clients; raise their number")
        return shares


def _evenly(by_class: list[Indices], settings: StreamSettings, what: str) -> list[Indices]:
    """Every client has an equal share of all, drawn at random."""
    mixed = shuffled(joined(by_class), settings.seed, what)
    return [mixed[client :: settings.num_clients] for client in range(settings.num_clients)]


def _by_two_classes(by_class: list[Indices], settings: StreamSettings, what: str) -> list[Indices]:
    """Samples in the order of their labels are cut into two pieces per client, of which each draws two (FedAvg's)."""
    pieces = np.array_split(joined(by_class), 2 * settings.num_clients)
    drawn = shuffled(np.arange(len(pieces)), settings.seed, what).tolist()
    return [joined([pieces[drawn[2 * i]], pieces[drawn[2 * i + 1]]]) for i in range(settings.num_clients)]


def _by_dirichlet(by_class: list[Indices], settings: StreamSettings, what: str) -> list[Indices]:
    """Of each class a client has a share from Dir(alpha) (Hsu et al. 2019)."""
    shares: list[list[Indices]] = [[] for _ in range(settings.num_clients)]
    for index, samples in enumerate(by_class):
        chance = uniform(settings.seed, f"{what}/{index}")
        heights = np.array([_gamma(settings.dirichlet_alpha, chance) for _ in range(settings.num_clients)])
        bounds = np.rint(np.cumsum(heights) / heights.sum() * len(samples)).astype(np.int64)[:-1]
        for share, piece in zip(shares, np.split(samples, bounds), strict=True):
            share.append(piece)
    return [joined(share) for share in shares]


_SPLITS = {"evenly": _evenly, "two-classes": _by_two_classes, "dirichlet": _by_dirichlet}


def _gamma(shape: float, chance: Iterator[float]) -> float:
    """Draw from Gamma(shape, 1): Marsaglia & Tsang 2000, "A Simple Method for Generating Gamma Variables"."""
    d = shape + 1 - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        x = math.sqrt(-2 * math.log(1 - next(chance))) * math.cos(2 * math.pi * next(chance))
        v = (1 + c * x) ** 3
        if v > 0 and math.log(1 - next(chance)) < 0.5 * x * x + d - d * v + d * math.log(v):
            # Gamma(a + 1) to Gamma(a): times U^(1/a); never 0, or a class might go to nobody
            return max(1e-300, d * v * math.pow(1 - next(chance), 1 / shape))
