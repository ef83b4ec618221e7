"""Clients that train at the same time, each on a thread of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.image_sets import small_dataset, write_fashion_mnist
from support.toy import TOY

from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.service.artefact_codec import encode_artefacts
from replayfleet.federation.simulator.client_threads import client_threads, still_training
from replayfleet.federation.simulator.measures.accounts import DigestOnly
from replayfleet.federation.simulator.settings import method_from
from replayfleet.federation.simulator.simulation import RoundOutcome, Simulation
from replayfleet.federation.streams.stream import Stream, StreamSettings

QUICK = {"sub_generator_epochs": "1", "first_sub_generator_epochs": "1", "replay_per_client": "8"}


def simulation(method: str, num_workers: int) -> Simulation:
    dataset = small_dataset()
    task = replace(dataset.task, architecture=TOY.architecture)
    size = StreamSettings(scenario="circulating", num_clients=3, num_rounds=2, samples_per_class=3)
    built = method_from(METHODS[method], task, "tiny", QUICK if method == "pfedgrp" else {})
    return Simulation(
        method=built,
        dataset=dataset,
        stream=Stream(size, dataset.train.labels, dataset.test.labels, dataset.task.num_classes),
        run_seed=0,
        sampler=sampler_of(built),
        num_workers=num_workers,
    )


def digests(simulated: Simulation) -> list[list[str]]:
    """Run, and name what everybody holds after each round."""
    found = []

    def note(outcome: RoundOutcome) -> None:
        held = [outcome.aggregator_state, *outcome.client_states.values(), *outcome.uploads.values()]
        found.append([blob.digest for one in held for blob in encode_artefacts(one.pack(), DigestOnly()).blobs])

    simulated.run(on_round=note)
    return found


@pytest.mark.parametrize("method", ["fedavg", "pfedgrp", "fedcil", "lander"])
def test_clients_at_the_same_time_give_the_bits_of_clients_one_after_the_other(method: str) -> None:
    assert digests(simulation(method, 3)) == digests(simulation(method, 1))


def test_as_many_clients_train_at_a_time_as_there_are_workers() -> None:
    both = threading.Barrier(2, timeout=20)
    with client_threads(2, 1) as threads:
        assert threads.map(lambda place: (both.wait(), place)[1], range(4)) == [0, 1, 2, 3]


def test_every_worker_computes_with_the_threads_that_it_was_given() -> None:
    before = torch.get_num_threads()
    with client_threads(2, 3) as threads:
        assert threads.map(lambda _: torch.get_num_threads(), range(4)) == [3] * 4
    assert torch.get_num_threads() == before


def test_one_worker_is_the_calling_thread() -> None:
    with client_threads(1, 1) as threads:
        assert threads.map(lambda _: threading.current_thread(), [0]) == [threading.current_thread()]


def test_an_error_of_one_client_is_the_rounds_error_and_later_clients_do_not_begin() -> None:
    begun = []

    def fail(place: int) -> None:
        begun.append(place)
        raise ValueError(f"client {place}")

    with pytest.raises(ValueError, match="client 0"), client_threads(2, 1) as threads:
        threads.map(fail, range(100))
    assert len(begun) < 100
    assert not still_training(timeout_s=10)


def test_who_still_trains_after_an_error_is_known() -> None:
    begun, release = threading.Event(), threading.Event()

    def train(place: int) -> None:
        if place == 0:
            begun.wait(20)
            raise ValueError("broken")
        begun.set()
        release.wait(20)

    with pytest.raises(ValueError, match="broken"), client_threads(2, 1) as threads:
        threads.map(train, range(2))
    assert still_training(timeout_s=0.01)
    release.set()
    assert not still_training(timeout_s=10)


def test_ctrl_c_ends_a_run_whose_clients_would_train_for_minutes(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path / "data", train_per_class=6, test_per_class=4)
    words = ["pfedgrp", "--settings", "tiny", "--clients", "2", "--workers", "2", "--out", str(tmp_path / "run")]
    for setting in ("samples_per_class=3", "test_samples_per_class=1", "sub_generator_epochs=100000"):
        words += ["--set", setting]
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv[0] = 'fleet-sim'; "
    code += "from replayfleet.federation.simulator.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "REPLAYFLEET_DATA": str(tmp_path / "data")},
    )
    try:
        assert "2 clients" in process.stdout.readline()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.endswith("fleet-sim: stopped; --resume continues after the last complete round\n")
