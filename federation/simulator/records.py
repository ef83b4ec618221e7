"""What a simulation measures in a round: plain values, which become JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from replayfleet.federation.simulator.measures import metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRecord:
    """One client in one round, measured after the aggregation.

    Bytes are those of parameter sets as raw safetensors, before compression.

    Attributes:
        classes: the class ids that its round data had; none of an absent client.
        accuracy: a_i^t, on its cumulative test set; mAP@0.5 of a detector.
        num_test: size of that set.
        num_seen: n_i^t, training samples met so far.
        class_accuracy: class id (place in the task's ``class_names``) -> accuracy on that class's part of the test set;
            average precision at 0.5 of a detector. Of the classes that it has met so far. In ``result.json`` keys are
            texts, as all of JSON's.
        train_s: wall time of its local round.
        bytes_up: of its upload, what the aggregator didn't hold yet.
        bytes_up_everything: what the task model and all its sub-generators would have been.
        bytes_down: of its download, what it didn't hold yet; also of a client that is absent from the round and is
            served from the aggregator's cache.
        bytes_down_everything: all of its download.
        sub_generators_sent: the classes (or ``all``) whose sub-generators went up.
        num_sub_generators_held: how many it has.
        present: whether it took part; an absent client is measured with what the aggregator has for it.
        num_updates: sub-generators trained in this round, where the method reports it.
        accuracy_by_place: town -> accuracy on that town's part of the test set; empty where the stream has no places.
        accuracy_in_task: likewise, if only classes of the image's task could be named (task-incremental); empty where
            tasks have the same classes.
        accuracy_among_seen: accuracy if it named only classes that it has met; None where that wasn't measured.
        mean_average_precision: mAP@0.5:0.95 of a detector on the test set; None of other tasks.
        epsilon: what its sub-generators have cost so far, at the run's ``dp_delta``; None without differential privacy,
            and of an absent client.
        cpu_s: part of its local round -> CPU seconds; empty of runs in step, and of those before it was measured.
        sample_steps: part -> samples times epochs, where the method says what it trains.
        losses: mean training loss of each epoch of its task model in this round, in their order; None where it wasn't
            finite; empty where ``sample_steps`` is.
        hostile: whether it attacked; ``RoundRecord.accuracy`` is that of the others.
        quarantined: why its upload was left out of the round; empty if it wasn't.
        served: the candidate that it chose to serve; empty where it serves what it downloads.
        evidence: candidate -> share of its evidence that this answers rightly.
    """

    classes: tuple[int, ...]
    accuracy: float
    num_test: int
    num_seen: int
    class_accuracy: dict[int, float]
    train_s: float
    bytes_up: int
    bytes_up_everything: int
    bytes_down: int
    bytes_down_everything: int
    sub_generators_sent: tuple[str, ...]
    num_sub_generators_held: int
    present: bool = True
    num_updates: int | None = None
    accuracy_by_place: dict[str, float] = field(default_factory=dict)
    accuracy_in_task: dict[str, float] = field(default_factory=dict)
    accuracy_among_seen: float | None = None
    mean_average_precision: float | None = None
    epsilon: float | None = None
    cpu_s: dict[str, float] = field(default_factory=dict)
    sample_steps: dict[str, int] = field(default_factory=dict)
    losses: tuple[float | None, ...] = ()
    hostile: bool = False
    quarantined: str = ""
    served: str = ""
    evidence: dict[str, float] = field(default_factory=dict)

    @property
    def num_sub_generator_updates(self) -> int:
        """Sub-generators trained in this round; those sent, where the method doesn't report it."""
        return len(self.sub_generators_sent) if self.num_updates is None else self.num_updates


@dataclass(frozen=True, kw_only=True, slots=True)
class LateChange:
    """That one client gets to a town where nobody was before, late in a run.

    Attributes:
        client: which.
        town: where it gets to.
        round: the first one there.
    """

    client: str
    town: str
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRecord:
    """One round of all clients.

    Attributes:
        round: counted from 0.
        accuracy: Acc^t of Eq. 4, of the honest clients.
        clients: client id -> its record, ids sorted.
        aggregate_s: wall time of the aggregation.
        round_s: wall time of the whole round, evaluation and saving included.
        aggregate_cpu_s: CPU seconds of the aggregation, whatever the threads; 0 of runs before it was measured.
    """

    round: int
    accuracy: float
    clients: dict[str, ClientRecord]
    aggregate_s: float
    round_s: float
    aggregate_cpu_s: float = 0.0


def kept_accuracy(records: Sequence[RoundRecord], change: LateChange) -> dict[str, float]:
    """Return what a client that got to a late town keeps of the earlier ones (see ``metrics.place_accuracy``).

    Its test sets of the earlier towns are the same before and after.

    Returns:
        ``earlier_before`` and ``earlier_after``: accuracy per earlier town after the last round before the change, and
        after the last round; ``earlier_kept``: their ratio, left out where there was nothing to keep.
    """
    ends = [records[change.round - 1].clients[change.client], records[-1].clients[change.client]]
    before, after = (
        metrics.place_accuracy(
            {change.client: {town: value for town, value in end.accuracy_by_place.items() if town != change.town}}
        )
        for end in ends
    )
    kept = {"earlier_kept": after / before} if before > 0 else {}
    return {"earlier_before": before, "earlier_after": after, **kept}


def summarise(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Return a run in a few numbers: the papers' metrics (see ``metrics``), and what travelled.

    ``sub_generator_updates`` is the paper's AUC. ``place_accuracy`` is there only where the stream has places,
    ``in_task_accuracy`` only where its tasks have classes of their own, and
    ``mean_average_precision``, the mean over clients after the last round, only of detectors. ``epsilon``, the largest
    of any client, is there only with differential privacy. ``accuracy_among_seen`` is the
    average accuracy if each client named only classes that it has met.
    """
    acc = [record.accuracy for record in records]
    names = sorted(name for name, client in records[-1].clients.items() if not client.hostile)
    histories = {name: [record.clients[name].class_accuracy for record in records] for name in names}
    updates = {name: [record.clients[name].num_sub_generator_updates for record in records] for name in names}
    everyone = [client for record in records for client in record.clients.values()]
    ends = {name: records[-1].clients[name] for name in names}
    by_place = {name: client.accuracy_by_place for name, client in ends.items()}
    in_task = {name: client.accuracy_in_task for name, client in ends.items()}
    precise = [value for client in ends.values() if (value := client.mean_average_precision) is not None]
    among = [value for value in map(_among_seen, records) if value is not None]
    spent = [client.epsilon for client in everyone if client.epsilon is not None]
    return {
        "final_accuracy": acc[-1],
        "average_accuracy": metrics.average_accuracy(acc),
        "late_accuracy": metrics.average_accuracy(acc[-metrics.LATE_ROUNDS :]),
        "average_forgetting_measure": metrics.average_forgetting_measure(acc),
        "average_forgetting": metrics.average_forgetting(histories),
        "sub_generator_updates": metrics.average_update_count(updates),
        "bytes_up": sum(client.bytes_up for client in everyone),
        "bytes_up_everything": sum(client.bytes_up_everything for client in everyone),
        "bytes_down": sum(client.bytes_down for client in everyone),
        "bytes_down_everything": sum(client.bytes_down_everything for client in everyone),
        **({"accuracy_among_seen": metrics.average_accuracy(among)} if among else {}),
        **({"place_accuracy": metrics.place_accuracy(by_place)} if any(by_place.values()) else {}),
        **({"in_task_accuracy": metrics.place_accuracy(in_task)} if any(in_task.values()) else {}),
        **({"mean_average_precision": sum(precise) / len(precise)} if precise else {}),
        **({"epsilon": max(spent)} if spent else {}),
    }


def losses(runs: Sequence[Sequence[RoundRecord]]) -> list[list[float]]:
    """Return for each round the training loss of each epoch, mean over the clients of all runs that trained so long.

    Empty for a round in which nobody's was measured, and ends before an epoch in which nobody's was finite.
    """
    found = []
    for records in zip(*runs, strict=False):
        own = [client.losses for record in records for client in record.clients.values()]
        epochs = []
        for epoch in range(max(map(len, own), default=0)):
            finite = [value for one in own if len(one) > epoch and (value := one[epoch]) is not None]
            if not finite:
                break
            epochs.append(sum(finite) / len(finite))
        found.append(epochs)
    return found


def costs(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Return what training and aggregation cost, evaluation apart: ``cpu_s`` and ``sample_steps``; none if unknown."""
    everyone = [client for record in records for client in record.clients.values()]
    cpu_s = sum(sum(client.cpu_s.values()) for client in everyone)
    if not cpu_s:
        return {}
    sample_steps = sum(sum(client.sample_steps.values()) for client in everyone)
    return {"cpu_s": cpu_s + sum(record.aggregate_cpu_s for record in records), "sample_steps": sample_steps}


def _among_seen(record: RoundRecord) -> float | None:
    """Return Acc^t of the honest clients if they named only classes that they have met; None where it isn't known."""
    honest = {name: client for name, client in record.clients.items() if not client.hostile}
    known = {name: value for name, client in honest.items() if (value := client.accuracy_among_seen) is not None}
    return metrics.weighted_accuracy(known, {name: honest[name].num_seen for name in known}) if known else None
