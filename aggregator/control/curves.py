"""``aggregator history --export``: the journal's numbers by round, as TensorBoard and MLflow show them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.protocol.limits import MAX_METRIC

REPORTED = (
    "accuracy",
    "boxes_found",
    "stream_accuracy",
    "train_s",
    "swap_s",
    "latency_p95_s",
    "bytes_up",
    "bytes_down",
    "dp_epsilon",
)
"""Of what clients report: what is exported for each of them; other names become no curve, for a client chooses them."""
_MEANS = REPORTED[:3]
_OF_ROUND = ("round_s", "aggregate_s", "publish_s", "downloads")
_COUNTED = {
    "upload accepted": "uploads",
    "upload rejected": "uploads_rejected",
    "upload quarantined": "uploads_quarantined",
    "download refused": "downloads_refused",
    "model rolled back": "rollbacks",
}
_EXPORTED_UNTIL = "replayfleet.exported_until"
_STARTED = "replayfleet.started"


@dataclass(frozen=True, slots=True)
class Point:
    """One number of one round.

    Attributes:
        name: ``fleet/<what>`` or ``client/<id>/<what>``.
        round: the round, from 0.
        at: Unix time, of the last event that made it.
        value: finite.
    """

    name: str
    round: int
    at: float
    value: float


def points(events: Iterable[Mapping[str, Any]]) -> Iterator[Point]:
    """Yield the numbers of a journal's events, by round and name; events that say none are passed over."""
    found: dict[tuple[int, str], Point] = {}
    for event in events:
        index, at = event.get("round"), event.get("time")
        if isinstance(index, int) and isinstance(at, (int, float)):
            for name, value in _numbers(event):
                found[index, name] = Point(name, index, float(at), value)
            if (counted := _COUNTED.get(str(event.get("event")))) is not None:
                before = found.get((index, f"fleet/{counted}"))
                value = 1.0 if before is None else before.value + 1
                found[index, f"fleet/{counted}"] = Point(f"fleet/{counted}", index, float(at), value)
    in_order = sorted(found.values(), key=lambda point: (point.round, point.name))
    for index, together in itertools.groupby(in_order, key=lambda point: point.round):
        of_round = list(together)
        yield from of_round
        yield from _means(index, of_round)


def export(events: Iterable[Mapping[str, Any]], fleet: str, kind: str, place: str, founded: str = "") -> int:
    """Write a journal's numbers where a viewer finds them; returns how many were written.

    Args:
        events: of the journal, oldest first; read once and not kept: a full journal is a gigabyte.
        fleet: its name, that of TensorBoard's run and MLflow's experiment.
        kind: ``tensorboard`` or ``mlflow``.
        place: a folder, or the URL of MLflow's tracking server or database.
        founded: names the fleet's run, however little of it the journal still knows; empty: its first start there does.

    Raises:
        SettingsError: The packages aren't installed, or the place can't be written.
    """
    return _to_mlflow(events, fleet, place, founded) if kind == "mlflow" else _to_tensorboard(events, fleet, place)


def _to_tensorboard(events: Iterable[Mapping[str, Any]], fleet: str, place: str) -> int:
    """Write a file of events; TensorBoard shows the newest export's in place of those before."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SettingsError(f"{error}; install it with: pip install 'replayfleet[tensorboard]'") from error
    found = list(points(events))
    try:
        writer = SummaryWriter(str(Path(place) / fleet), purge_step=0)
        with writer:
            for point in found:
                writer.add_scalar(point.name, point.value, point.round, walltime=point.at)
    except OSError as error:
        raise SettingsError(
            f"--to {place}: {error.strerror or error}; expected a folder that can be written"
        ) from error
    return len(found)


def _to_mlflow(events: Iterable[Mapping[str, Any]], fleet: str, place: str, founded: str) -> int:
    """Write into one run of the fleet's experiment; a later export adds what happened since."""
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise SettingsError(f"{error}; install it with: pip install 'replayfleet[mlflow]'") from error
    os.environ.setdefault(
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"
    )  # its seven take four minutes to say that nobody is there
    order: dict[float, int] = {}
    started: dict[str, Any] = {}
    found = list(points(_noted(events, order, started)))
    began = str(started.get("time", ""))  # names the run of an earlier version
    try:
        client = MlflowClient(tracking_uri=place if "://" in place else _database_in(Path(place)))
        known = client.get_experiment_by_name(fleet)
        experiment = client.create_experiment(fleet) if known is None else known.experiment_id
        runs = [
            run
            for name in (founded or began, began)
            for run in client.search_runs([experiment], f"tags.`{_STARTED}` = '{name}'", max_results=1)
        ]
        run = runs[0] if runs else client.create_run(experiment)
        client.set_tag(run.info.run_id, _STARTED, founded or began)
        until = float(run.data.tags.get(_EXPORTED_UNTIL, "-inf"))
        if not runs:
            for name, text in _parameters(started):
                client.log_param(run.info.run_id, name, text)
        known = order.get(until)  # what stands after it is newer, wherever the clock was put
        new = [point for point in found if (point.at > until if known is None else order[point.at] > known)]
        for first in range(0, len(new), 1000):  # of one request, MLflow's limit
            batch = [Metric(p.name, p.value, int(p.at * 1000), p.round) for p in new[first : first + 1000]]
            client.log_batch(run.info.run_id, metrics=batch)
        if new:
            client.set_tag(
                run.info.run_id, _EXPORTED_UNTIL, repr(max((point.at for point in new), key=order.__getitem__))
            )
    except (MlflowException, OSError, ValueError) as error:
        said = str(error).strip().partition("\n")[0]
        raise SettingsError(f"--to {place}: {said}; what was written before stays, run it again") from error
    return len(new)


def _noted(
    events: Iterable[Mapping[str, Any]], order: dict[float, int], started: dict[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield the events, and note the place of each time, and the first start."""
    for number, event in enumerate(events):
        if isinstance(at := event.get("time"), (int, float)):
            order[at] = number
        if event.get("event") == "aggregator started" and not started:
            started.update(event)
        yield event


def _database_in(folder: Path) -> str:
    """Return MLflow's URL of a database in a folder, which is made if need be: it no longer writes plain files."""
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder.resolve()}/mlflow.db"


def _numbers(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    kind = event.get("event")
    if kind == "round committed":
        yield from ((f"fleet/{name}", event[name]) for name in _OF_ROUND if _is_number(event.get(name)))
    elif kind == "client report" and isinstance(values := event.get("metrics"), dict):
        about = f"client/{event.get('client')}"
        yield from ((f"{about}/{name}", float(values[name])) for name in REPORTED if _is_number(values.get(name)))


def _means(index: int, of_round: list[Point]) -> Iterator[Point]:
    """Yield mean and lowest over the clients that reported in a round."""
    for name in _MEANS:
        told = [point for point in of_round if point.name.startswith("client/") and point.name.endswith(f"/{name}")]
        if told:
            at = max(point.at for point in told)
            yield Point(f"fleet/{name}", index, at, fmean(point.value for point in told))
            yield Point(f"fleet/{name}_lowest", index, at, min(point.value for point in told))


def _parameters(started: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    spec = started.get("spec")
    for name, value in spec.items() if isinstance(spec, dict) else ():
        if isinstance(value, (str, int, float)):
            yield name, str(value)[:500]
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", str(inner)[:500]) for key, inner in value.items())


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_METRIC
