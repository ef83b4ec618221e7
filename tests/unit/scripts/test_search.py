from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.image_sets import small_dataset

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import ALL_METHODS
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.settings import method_fields, method_from
from replayfleet.scripts.experiments import search
from replayfleet.scripts.experiments.search import OWN, best_of, lines_of, trial_settings, validation


def test_validation_images_are_those_of_the_training_part_each_once():
    data = small_dataset()
    found = validation(data)
    images = np.concatenate([found.train.images, found.test.images]).reshape(len(data.train.labels), -1)
    assert sorted(map(bytes, images)) == sorted(map(bytes, data.train.images.reshape(len(images), -1)))
    assert min(found.test.counts()) >= 1
    assert found.test.counts() == [count // 6 for count in data.train.counts()]


@pytest.mark.parametrize("method", [*OWN, "fedavg", "fedem"])
def test_a_trial_is_of_settings_that_the_method_has(method: str):
    task = small_dataset().task
    assert trial_settings(method, 0) == {}
    for trial in range(1, 5):
        settings = trial_settings(method, trial)
        assert settings == trial_settings(method, trial)
        assert set(settings) <= set(method_fields(ALL_METHODS[method]))
        assert method_from(ALL_METHODS[method], task, "small", settings)
    for name in OWN.get(method, {}):
        assert name in settings


def test_a_search_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[tuple[str, int, tuple[str, ...]]] = []

    def trial(spec: RunSpec, _data: object) -> dict[str, Any]:
        ran.append((spec.method, spec.seed, spec.overrides))
        return {"score": 0.5 + 0.1 * len(ran), "run": {}}

    monkeypatch.setattr(search, "run_trial", trial)
    monkeypatch.setattr(search, "load_dataset", lambda *_a, **_k: small_dataset())
    words = ["fedavg", "pfedgrp", "--out", str(tmp_path)]
    stopped = CliRunner().invoke(search.search, [*words, "--trials", "2", "--minutes", "0"], standalone_mode=False)
    assert (stopped.return_value, ran) == (3, [])
    assert CliRunner().invoke(search.search, [*words, "--trials", "1"], standalone_mode=False).return_value == 0
    assert CliRunner().invoke(search.search, [*words, "--trials", "2"], standalone_mode=False).return_value == 0
    assert [name for name, _, _ in ran] == ["fedavg", "pfedgrp", "fedavg", "pfedgrp"]  # equal budgets at any moment
    assert {seed for _, seed, _ in ran} == {1000}
    words = ["fedcil", "mfcl", "--set", "precision=bfloat16", "--out", str(tmp_path / "fixed"), "--trials", "1"]
    assert CliRunner().invoke(search.search, words, standalone_mode=False).return_value == 0
    assert [overrides for *_, overrides in ran[4:]] == [(), ("precision=bfloat16", "replay_labels=latents")]
    mixed = CliRunner().invoke(search.search, [*words[:2], *words[4:]], standalone_mode=False)
    assert "has trials with precision=bfloat16 as --set; expected the same" in str(mixed.exception)
    refused = CliRunner().invoke(search.search, ["mfcl", "--set", "precison=x", *words[4:]], standalone_mode=False)
    assert isinstance(refused.exception, SettingsError)
    assert "precison" in str(refused.exception)
    assert [line["trial"] for line in lines_of(tmp_path / "trials.jsonl")] == [0, 0, 1, 1]
    assert best_of(lines_of(tmp_path / "trials.jsonl"))[0].startswith(
        "fedavg: best of 2 trials 80.0 %, the preset 60.0 %"
    )


def test_a_line_that_is_no_trial_is_refused(tmp_path: Path):
    (tmp_path / "trials.jsonl").write_text("{\n")
    with pytest.raises(SettingsError, match="remove the line"):
        lines_of(tmp_path / "trials.jsonl")


def test_trials_on_another_stream_are_not_taken_for_those_asked_for(tmp_path: Path):
    stream = {"scenario": "gradual", "num_clients": 2, "num_rounds": 10}
    run = {"dataset": "fashion-mnist", "preset": "small", "stream": stream}
    (tmp_path / "trials.jsonl").write_text(json.dumps({"method": "fedavg", "trial": 0, "fixed": [], "run": run}) + "\n")
    words = ["fedavg", "--out", str(tmp_path), "--trials", "1", "--rounds", "20", "--settings", "tiny"]
    refused = CliRunner().invoke(search.search, words, standalone_mode=False)
    assert "has trials with --settings small, --rounds 10; expected the same" in str(refused.exception)
