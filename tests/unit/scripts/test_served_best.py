from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.image_sets import write_fashion_mnist

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.steps import serving
from replayfleet.scripts.experiments.served_best import experiment, summary


def test_both_ways_to_serve_are_run_and_all_models_that_were_held_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serving, "NUM_REPLAYED", 8)
    write_fashion_mnist(tmp_path, train_per_class=60, test_per_class=20)
    words = ["--settings", "tiny", "--clients", "2", "--rounds", "2", "--data-root", str(tmp_path)]
    sizes = ["--set", "samples_per_class=10", "--set", "test_samples_per_class=4", "--set", "local_epochs=1"]
    out = tmp_path / "served.json"
    CliRunner().invoke(experiment, ["pfedgrp-plus", *words, *sizes, "--out", str(out)], catch_exceptions=False)
    found = json.loads(out.read_text())["runs"]
    for how, run in found.items():
        assert run["run"]["settings"].get("serve", "downloaded") == how
        assert run["summary"]["updates"] == 4
        first, second = (one["clients"]["client-0"] for one in run["rounds"])
        assert first["accuracy"].keys() == {"personalised", "average", "own"}
        assert second["accuracy"].keys() == {"served", "personalised", "average", "own"}
        assert ("choice" in first) == (how == "best")
    for one in found["best"]["rounds"]:
        for client in one["clients"].values():
            assert client["served"] == client["accuracy"][client["choice"]["name"]]
            assert client["accuracy"].keys() == client["choice"]["scores"].keys()
    with pytest.raises(SettingsError, match="serve"):
        CliRunner().invoke(experiment, ["fedavg", *words, *sizes, "--out", str(out)], catch_exceptions=False)


def test_a_fall_is_what_was_served_below_the_best_that_was_held():
    def client(served: float, name: str, **accuracy: float) -> dict[str, object]:
        return {"served": served, "choice": {"name": name}, "accuracy": accuracy}

    rounds = [
        {"accuracy": 0.8, "clients": {"a": client(0.9, "own", personalised=0.7, own=0.9)}},
        {"accuracy": 0.6, "clients": {"a": client(0.8, "average", personalised=0.86, own=0.84, average=0.8)}},
    ]
    found = summary(rounds)
    assert found["largest_fall"] == pytest.approx(0.06)
    assert (found["falls_over_5_points"], found["updates"]) == (1, 2)
    assert found["average_accuracy"] == pytest.approx(0.7)
    assert found["chosen"] == {"own": 1, "average": 1}
