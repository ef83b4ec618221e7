from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.image_sets import write_fashion_mnist

from replayfleet.federation.errors import SettingsError
from replayfleet.scripts.experiments.served_best import experiment, summary


def test_what_is_served_is_chosen_round_by_round_and_training_stays_as_it_was(tmp_path: Path):
    write_fashion_mnist(tmp_path, train_per_class=60, test_per_class=20)
    words = ["--settings", "tiny", "--clients", "2", "--rounds", "2", "--data-root", str(tmp_path)]
    sizes = ["--set", "samples_per_class=10", "--set", "test_samples_per_class=4"]
    out = tmp_path / "served.json"
    CliRunner().invoke(experiment, ["pfedgrp-plus", *words, *sizes, "--out", str(out)], catch_exceptions=False)
    found = json.loads(out.read_text())
    assert [one["round"] for one in found["rounds"]] == [0, 1]
    first, second = (one["clients"]["client-0"] for one in found["rounds"])
    assert first["accuracy"].keys() == {"personalised", "average", "own"}
    assert second["accuracy"].keys() == {"served", "personalised", "average", "own"}
    assert second["accuracy"].keys() == second["scores"].keys()
    assert found["summary"]["choices"] == 4
    with pytest.raises(SettingsError, match="keeps no replay"):
        CliRunner().invoke(experiment, ["fedavg", *words, *sizes, "--out", str(out)], catch_exceptions=False)


def test_a_fall_is_what_was_served_below_the_best_that_was_held():
    def client(best: str, **accuracy: float) -> dict[str, object]:
        return {"best": best, "downloaded": "personalised", "accuracy": accuracy}

    rounds = [
        {"best": 0.8, "downloaded": 0.8, "clients": {"a": client("own", personalised=0.7, own=0.9)}},
        {"best": 0.6, "downloaded": 0.5, "clients": {"a": client("own", personalised=0.86, own=0.84)}},
    ]
    found = summary(rounds)
    assert found["largest_fall"] == {"best": pytest.approx(0.02), "downloaded": pytest.approx(0.2)}
    assert found["falls_over_5_points"] == {"best": 0, "downloaded": 1}
    assert found["average_accuracy"] == {"best": pytest.approx(0.7), "downloaded": pytest.approx(0.65)}
    assert found["chosen"] == {"own": 2}
