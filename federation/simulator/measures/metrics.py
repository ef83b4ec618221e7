"""What the papers measure, each once, with its formula. Accuracies are shares in [0, 1]; rounds rise from the first.

Sources: pFedGRP, appendix A.3 (Eq. 4 to 6), section 5.3 (AUC), and its first version, appendix C.2 (Eq. 9 to 11); MFCL,
section 5 (forgetting). ``docs/metrics.md`` has them in one place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LATE_ROUNDS = 5
"""How many of the last rounds show where a method ends, without how it began."""


def accuracy(num_correct: int, num_test: int) -> float:
    """a_i^t: share of a client's cumulative test set that its model gets right.

    Raises:
        ValueError: Not 0 <= num_correct <= num_test, or nothing was tested.
    """
    if not 0 <= num_correct <= num_test or num_test == 0:
        raise ValueError(f"{num_correct} of {num_test} test samples correct is no accuracy")
    return num_correct / num_test


def weighted_accuracy(accuracies: Mapping[str, float], num_seen: Mapping[str, int]) -> float:
    """Acc^t = sum_i n_i^t a_i^t / sum_i n_i^t (Eq. 4; Eq. 9 of the first version calls it IAA).

    Args:
        accuracies: client -> a_i^t.
        num_seen: client -> n_i^t, training samples met so far.

    Raises:
        ValueError: The clients differ, or nobody has seen a sample.
    """
    if accuracies.keys() != num_seen.keys():
        raise ValueError(f"accuracies of {sorted(accuracies)} but samples of {sorted(num_seen)}")
    total = sum(num_seen.values())
    if not total > 0:
        raise ValueError("no client has seen a training sample, so Acc has no weights")
    return sum(num_seen[client] * accuracies[client] for client in sorted(accuracies)) / total


def average_accuracy(acc: Sequence[float]) -> float:
    """AA = 1/T sum_t Acc^t (Eq. 5)."""
    return _mean(acc)


def average_regret(acc: Sequence[float], acc_centralized: Sequence[float]) -> float:
    """AR = 1/T sum_t (Acc_Centralized^t - Acc^t), so that less is better, as in the paper's tables.

    Eq. 6 as printed has the opposite sign of the tables. Negative where the method beats Centralized.

    Raises:
        ValueError: The runs differ in length.
    """
    return _mean([upper - own for own, upper in zip(acc, acc_centralized, strict=True)])


def average_forgetting_measure(acc: Sequence[float]) -> float:
    """AFM = 1/(T-1) sum_{t=2}^{T} max(0, Acc^{t-1} - Acc^t) (Eq. 11 of the first version); 0 for one round."""
    drops = [max(0.0, before - after) for before, after in itertools.pairwise(acc)]
    return _mean(drops) if drops else 0.0


def forgetting(history: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """f_c = max_{t < T} a_c^t - a_c^T for every class c met before the last round.

    Of all rounds, where ``task_forgetting`` is of the ends of tasks alone: it is higher for that.
    Negative where the model ends better on the class than it ever was.

    Args:
        history: per round, class id -> accuracy on the cumulative test samples of that class; absent until first met.

    Raises:
        ValueError: No round, or a class met earlier is missing in the last round.
    """
    if not history:
        raise ValueError("forgetting needs at least one round")
    *earlier, last = history
    best: dict[int, float] = {}
    for accuracies in earlier:
        for class_id, value in accuracies.items():
            best[class_id] = max(value, best.get(class_id, value))
    lost = best.keys() - last.keys()
    if lost:
        raise ValueError(f"classes {sorted(lost)} were tested before but not in the last round")
    return {class_id: best[class_id] - last[class_id] for class_id in sorted(best)}


def average_forgetting(histories: Mapping[str, Sequence[Mapping[int, float]]]) -> float:
    """Mean of ``forgetting`` over all clients and their classes; 0 where no class was met before the last round."""
    values = [value for client in sorted(histories) for value in forgetting(histories[client]).values()]
    return _mean(values) if values else 0.0


def place_accuracy(by_place: Mapping[str, Mapping[str, float]]) -> float:
    """PA = 1/n sum_i 1/|P_i| sum_{p in P_i} a_{i,p}^T: mean over a client's places, then over clients.

    Every town counts alike, however many objects stand there.

    Args:
        by_place: client -> place -> accuracy on the test samples of that place, after the last round.

    Raises:
        ValueError: There is no client, or one was tested nowhere.
    """
    return _mean([_mean(list(by_place[client].values())) for client in sorted(by_place)])


def task_ends(num_rounds: int, changes: Sequence[int]) -> list[int]:
    """The last round of each task, the last one's included, where new tasks begin at ``changes`` (rounds from 0)."""
    return [*(change - 1 for change in changes if 0 < change < num_rounds), num_rounds - 1]


def task_forgetting(by_task: Sequence[Mapping[str, float]]) -> float:
    """Fgt_T = 1/(T-1) sum_{i<T} max_{j<T} a_{j,i} - a_{T,i} (FedGP, section 5.1; MFCL's, of tasks); 0 for one task.

    Args:
        by_task: at the end of each task j, task -> accuracy a_{j,i} on its test samples, of tasks met so far.
    """
    *earlier, last = by_task
    best = {task: max(met[task] for met in earlier if task in met) for task in last if any(task in m for m in earlier)}
    return _mean([best[task] - last[task] for task in sorted(best)]) if best else 0.0


def average_update_count(updates: Mapping[str, Sequence[int]]) -> float:
    """AUC = 1/n sum_i sum_t u_i^t: updates of a client's sub-generators over all rounds, mean over clients.

    Args:
        updates: client -> u_i^t per round, how many of its sub-generators it trained.

    Raises:
        ValueError: There is no client.
    """
    return _mean([float(sum(updates[client])) for client in sorted(updates)])


@dataclass(frozen=True, slots=True)
class Summary:
    """A number measured under several seeds.

    Attributes:
        mean: over the seeds.
        spread: the sample standard deviation, sqrt(sum (x - mean)^2 / (n - 1)); None for one seed.
        num_seeds: n.
    """

    mean: float
    spread: float | None
    num_seeds: int


def over_seeds(values: Sequence[float]) -> Summary:
    """Return mean and spread of one number per seed.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("the mean over no seeds is undefined")
    mean = _mean(values)
    if len(values) == 1:
        return Summary(mean, None, 1)
    return Summary(mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)), len(values))


def _mean(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("the mean of no rounds is undefined")
    return sum(values) / len(values)
