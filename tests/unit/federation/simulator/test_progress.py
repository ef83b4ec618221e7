from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from replayfleet.federation.methods.kit.task_records import TaskDownload
from replayfleet.federation.simulator.progress import Progress
from replayfleet.federation.simulator.records import ClientRecord, RoundRecord, summarise
from replayfleet.federation.simulator.result import Result
from replayfleet.federation.simulator.simulation import RoundOutcome


def client(
    accuracy: float,
    *,
    sent: tuple[str, ...] = (),
    held: int = 0,
    num_bytes: int = 0,
    classes: dict[int, float] | None = None,
    present: bool = True,
):
    return ClientRecord(
        classes=(0, 1),
        accuracy=accuracy,
        num_test=10,
        num_seen=20,
        class_accuracy=classes or {0: accuracy},
        train_s=1.0,
        bytes_up=num_bytes,
        bytes_up_everything=2 * num_bytes,
        bytes_down=num_bytes,
        bytes_down_everything=3 * num_bytes,
        sub_generators_sent=sent,
        num_sub_generators_held=held,
        present=present,
    )


def record(index: int, *clients: ClientRecord):
    mean = sum(c.accuracy for c in clients) / len(clients)
    named = {f"client-{place}": c for place, c in enumerate(clients)}
    return RoundRecord(round=index, accuracy=mean, clients=named, aggregate_s=0.5, round_s=3.0)


def outcome(one: RoundRecord):
    return RoundOutcome(one, {}, {}, None, {})


def test_the_range_of_accuracies_is_that_of_the_honest_clients_as_their_mean_is():
    progress = Progress(num_rounds=1, num_clients=3)
    hostile = dataclasses.replace(client(0.1), hostile=True)
    one = dataclasses.replace(record(0, client(0.5), client(0.7), hostile), accuracy=0.6)
    assert "accuracy  60.0 % (50.0 to 70.0)" in progress.line(outcome(one))
    result = Result(
        run={"method": "fedavg"},
        stream={},
        rounds=[one],
        summary={},
        hardware={},
        versions={},
        commit="",
        wall_s=0,
        command=[],
    )
    assert result.curve().clients == {"client-0": [0.5], "client-1": [0.7]}


def test_the_line_of_a_round_estimates_the_time_left(capsys: pytest.CaptureFixture[str]):
    now = [0.0]
    progress = Progress(num_rounds=11, num_clients=2, clock=lambda: now[0])
    now[0] = 30.0
    progress.round_done(outcome(record(0, client(0.5, sent=("1",), held=4, num_bytes=10**6), client(0.7, held=3))))
    line = capsys.readouterr().out
    assert "accuracy  60.0 % (50.0 to 70.0)" in line
    assert "sub-generators 1 of 7 sent" in line
    assert "up 1.0 MB" in line
    assert "about 5 min left" in line


def test_a_model_that_training_ruined_is_named_in_the_line(capsys: pytest.CaptureFixture[str]):
    fine, ruined = (TaskDownload({"weight": torch.tensor([1.0, value])}) for value in (2.0, math.nan))
    first, second = (outcome(record(index, client(0.5), client(0.5))) for index in (0, 1))
    progress = Progress(2, 2)
    progress.round_done(dataclasses.replace(first, downloads={"client-0": fine, "client-1": ruined}))
    assert "DIVERGED: models of client-1 are not finite  about" in capsys.readouterr().out
    progress.round_done(dataclasses.replace(second, downloads={"client-0": ruined, "client-1": ruined}))
    assert progress.diverged == 0, "the first of them"
    assert "DIVERGED" not in Progress(1, 2).line(dataclasses.replace(first, downloads={"client-0": fine}))


def test_absent_clients_are_counted_in_the_line():
    line = Progress(num_rounds=2, num_clients=2, num_absent=1).line(outcome(record(1, client(0.5), client(0.7))))
    assert "absent" not in line
    line = Progress(2, 2, num_absent=1).line(outcome(record(1, client(0.5), client(0.7, present=False))))
    assert "round 1  1 absent  accuracy  60.0 % (50.0 to 70.0)" in line


def test_a_terminal_shows_how_many_of_those_present_have_had_their_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    progress = Progress(num_rounds=2, num_clients=3, num_absent=1)
    for name in ("a", "b", "c"):
        progress.client_begins(0, name)
    progress.round_done(outcome(record(0, client(0.5))))
    for name in ("a", "c"):
        progress.client_begins(1, name)
    out = capsys.readouterr().out
    assert "round 0: c trains (3 of 3)" in out
    assert "round 1: a trains (1 of 2)" in out
    assert "round 1: c trains (2 of 2)" in out


def test_a_resumed_run_counts_only_the_rounds_that_it_ran(capsys: pytest.CaptureFixture[str]):
    now = [0.0]
    progress = Progress(num_rounds=10, num_clients=1, clock=lambda: now[0])
    now[0] = 7.0
    progress.round_done(outcome(record(7, client(0.5))))
    assert "about 14 s left" in capsys.readouterr().out


def test_the_last_round_has_nothing_left_and_a_method_without_sub_generators_names_none(
    capsys: pytest.CaptureFixture[str],
):
    Progress(num_rounds=1, num_clients=1).round_done(outcome(record(0, client(0.5))))
    line = capsys.readouterr().out
    assert "left" not in line
    assert "sub-generators" not in line


def test_a_summary_adds_up_what_travelled_and_takes_the_papers_metrics():
    records = [
        record(0, client(0.8, sent=("1", "2"), num_bytes=10, classes={0: 0.8}), client(0.6, classes={1: 0.6})),
        record(1, client(0.4, sent=("1",), num_bytes=1, classes={0: 0.3}), client(0.6, classes={1: 0.6})),
    ]
    summary = summarise(records)
    assert summary["final_accuracy"] == 0.5
    assert round(summary["average_accuracy"], 9) == 0.6
    assert round(summary["average_forgetting_measure"], 9) == 0.2
    assert round(summary["average_forgetting"], 9) == 0.25
    assert summary["sub_generator_updates"] == 1.5
    assert [summary[key] for key in ("bytes_up", "bytes_up_everything", "bytes_down_everything")] == [11, 22, 33]


def test_what_hostile_clients_answer_is_in_no_number_of_a_summary():
    honest = dataclasses.replace(
        client(0.5), accuracy_by_place={"0": 0.4}, accuracy_in_task={"0": 0.6}, mean_average_precision=0.3
    )
    hostile = dataclasses.replace(
        honest, hostile=True, accuracy_by_place={"0": 0.0}, accuracy_in_task={"0": 0.0}, mean_average_precision=0.0
    )
    summary = summarise([record(0, honest, hostile)])
    names = ("place_accuracy", "in_task_accuracy", "mean_average_precision")
    assert [summary[name] for name in names] == [0.4, 0.6, 0.3]
