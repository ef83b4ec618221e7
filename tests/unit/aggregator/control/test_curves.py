from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from replayfleet.aggregator.cli import cli
from replayfleet.aggregator.control.curves import export, points
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.data_dir import claim_data_dir
from replayfleet.federation.wire.protocol.messages import FleetSpec


def events(num_rounds: int = 2) -> list[dict[str, Any]]:
    spec = {"fleet": "yard", "method": "pfedgrp", "settings": {"local_epochs": 2}}
    found: list[dict[str, Any]] = [{"time": 1.0, "event": "aggregator started", "spec": spec, "round": 0}]
    for index in range(num_rounds):
        at = 10.0 * index
        found += [
            {"time": at + 2, "event": "upload accepted", "round": index, "client": "a"},
            {"time": at + 3, "event": "upload accepted", "round": index, "client": "b"},
            {"time": at + 4, "event": "round committed", "round": index, "round_s": 3.0, "aggregate_s": 1.0},
            {"time": at + 5, "event": "client report", "round": index, "client": "a", "metrics": {"accuracy": 0.5}},
            {"time": at + 6, "event": "client report", "round": index, "client": "b", "metrics": {"accuracy": 0.75}},
        ]
    return found


def test_numbers_by_round() -> None:
    assert [(point.name, point.round, point.at, point.value) for point in points(events(1))] == [
        ("client/a/accuracy", 0, 5.0, 0.5),
        ("client/b/accuracy", 0, 6.0, 0.75),
        ("fleet/aggregate_s", 0, 4.0, 1.0),
        ("fleet/round_s", 0, 4.0, 3.0),
        ("fleet/uploads", 0, 3.0, 2.0),
        ("fleet/accuracy", 0, 6.0, 0.625),
        ("fleet/accuracy_lowest", 0, 6.0, 0.5),
    ]


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_an_export_keeps_no_event_of_a_journal_that_may_be_full(tmp_path: Path, kind: str) -> None:
    class Event(dict[str, Any]):
        """Unlike a dict, it can be referred to weakly."""

    read: list[weakref.ref[Event]] = []
    most_kept = 0

    def journal() -> Iterator[Event]:
        nonlocal most_kept
        for one in events(20):
            event = Event(one)
            read.append(weakref.ref(event))
            yield event
            most_kept = max(most_kept, sum(event() is not None for event in read))

    assert export(journal(), "yard", kind, str(tmp_path)) == len([*points(events(20))])
    assert len(read) == len(events(20))
    assert most_kept <= 2


def test_what_a_client_makes_up_becomes_no_curve() -> None:
    report = {"time": 1.0, "event": "client report", "round": 0, "client": "a"}
    hostile = [
        {**report, "metrics": {"../../x": 1.0, "accuracy": float("nan"), "swap_s": "fast", "train_s": True}},
        {**report, "metrics": ["accuracy"]},
        {**report, "round": "0", "metrics": {"accuracy": 1.0}},
        {**report, "metrics": {"accuracy": 10**400}},
        *({**report, "client": client, "metrics": {"accuracy": 1.7e308}} for client in "ab"),
        {"event": "upload accepted", "round": 0},
    ]
    assert list(points(hostile)) == []


def test_tensorboard_shows_the_newest_export(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert export(events(1), "yard", "tensorboard", str(tmp_path)) == 7
    assert export(events(2), "yard", "tensorboard", str(tmp_path)) == 14
    found = EventAccumulator(str(tmp_path / "yard")).Reload()
    scalars = found.Scalars("fleet/accuracy")
    assert [(scalar.step, scalar.value, scalar.wall_time) for scalar in scalars] == [(0, 0.625, 6.0), (1, 0.625, 16.0)]


def test_mlflow_has_one_run_that_later_exports_go_on_with(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    assert export(events(1), "yard", "mlflow", str(tmp_path)) == 7
    assert export(events(2), "yard", "mlflow", str(tmp_path)) == 7
    assert export(events(2), "yard", "mlflow", str(tmp_path)) == 0
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("yard")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"fleet": "yard", "method": "pfedgrp", "settings.local_epochs": "2"}
    history = client.get_metric_history(run.info.run_id, "fleet/accuracy")
    assert sorted((metric.step, metric.value) for metric in history) == [(0, 0.625), (1, 0.625)]


def test_what_came_after_a_clock_was_put_back_is_exported_to_mlflow_once(tmp_path: Path) -> None:
    ahead = [{**event, "time": event["time"] + 1e8} for event in events(1)]
    for known, number in ((ahead, 7), (ahead + events(2)[6:], 7), (ahead + events(2)[6:], 0)):
        assert export(known, "yard", "mlflow", str(tmp_path)) == number


def test_a_fleet_s_run_in_mlflow_goes_on_when_its_journal_has_forgotten_how_it_began(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    data = tmp_path / "data"
    with claim_data_dir(data, fleet="yard", role="aggregator"), contextlib.closing(AggregatorStore(data)) as store:
        store.found(FleetSpec("yard", "pfedgrp", {}, {}, 0), 0.5)

    def exported(known: list[dict[str, Any]]) -> str:
        (data / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in known))
        words = ["history", "--data-dir", str(data), "--export", "mlflow", "--to", str(tmp_path)]
        return CliRunner().invoke(cli, words).output.partition(" for ")[0]

    assert export(events(1), "yard", "mlflow", str(tmp_path)) == 7, "as an earlier version named it"
    assert exported(events(2)) == "7 numbers"
    assert exported(events(3)[6:]) == "7 numbers", "its first round was put aside"
    assert exported([{"time": 40.0, "event": "aggregator started", "round": 2}, *events(3)[11:]]) == "0 numbers"
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("yard")
    (run,) = client.search_runs([experiment.experiment_id])
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "fleet/accuracy")] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_a_place_that_takes_nothing(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="--to"):
        export(events(1), "yard", kind, str(tmp_path / "file"))


def test_the_command(tmp_path: Path) -> None:
    with claim_data_dir(tmp_path / "data", fleet="yard", role="aggregator"):
        pass
    lines = "".join(json.dumps(event) + "\n" for event in events(1))
    (tmp_path / "data" / "events.jsonl").write_text(lines)
    arguments = ["history", "--data-dir", str(tmp_path / "data")]
    done = CliRunner().invoke(cli, [*arguments, "--export", "tensorboard", "--to", str(tmp_path / "curves")])
    assert done.output == f"7 numbers for tensorboard in {tmp_path / 'curves'}\n"
    assert list((tmp_path / "curves" / "yard").iterdir())
    for more in (["--last", "1"], ["--client", "cam-1"], ["--deeds"], ["--json"]):
        narrowed = CliRunner().invoke(cli, [*arguments, "--export", "tensorboard", "--to", "x", *more])
        assert f"leave out {more[0]}" in str(narrowed.exception)
    alone = CliRunner().invoke(cli, [*arguments, "--export", "mlflow"])
    assert isinstance(alone.exception, SettingsError)
    assert "belong together" in str(alone.exception)
