from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.service.fleet.presets import SETTINGS, TASKS
from replayfleet.federation.service.settings import split_overrides
from replayfleet.federation.simulator.settings import (
    SIZES,
    StreamSize,
    default_settings,
    method_fields,
    method_from,
    settings_of,
    stream_settings,
)
from replayfleet.federation.streams.stream import Stream

FASHION = TASKS["fashion-mnist"]
GIVEN = {"scenario": "circulating", "seed": 3}


def test_every_preset_has_a_stream():
    assert sorted(SIZES) == sorted(SETTINGS)


@pytest.mark.parametrize("name", METHODS)
def test_a_setting_belongs_to_the_stream_or_to_the_method_never_to_both(name: str):
    assert not {field.name for field in dataclasses.fields(StreamSize)} & set(method_fields(METHODS[name]))


@pytest.mark.parametrize("preset", SETTINGS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_every_preset(name: str, preset: str):
    method_from(METHODS[name], FASHION, preset, {})


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("learning_rate=inf", "0 to 3.4e+38"),
        ("learning_rate=1e300", "0 to 3.4e+38"),
        ("learning_rate=nan", "a number of 0 or more"),
        ("batch_size=99999999999999999999999", "2 to 2147483647"),
        ("local_epochs=1e9", "1 to 1000000"),
    ],
)
def test_numbers_that_no_training_can_compute_with_are_refused(setting: str, expected: str):
    with pytest.raises(SettingsError, match=f"expected a (whole )?number of {re.escape(expected)}|{expected}"):
        method_from(METHODS["fedavg"], FASHION, "tiny", dict([setting.split("=")]))


def test_the_paper_s_numbers_are_those_of_its_appendix():
    method = method_from(METHODS["pfedgrp"], FASHION, "paper", {})
    assert (method.local_epochs, method.sub_generator_epochs, method.aggregation_epochs) == (20, 200, 20)
    assert (method.learning_rate, method.momentum, method.weight_decay) == (0.01, 0.9, 0.01)
    assert method.aggregation_patience == 0, "the paper runs all epochs of Eq. 3"
    assert (method.alignment_weight, method.gate_threshold) == (0.3, 0.25)
    assert method_from(METHODS["pfedgrp"], TASKS["cifar-10"], "paper", {}).sub_generator_epochs == 500
    stream = stream_settings("paper", "fashion-mnist", 28, {}, GIVEN)
    assert (stream.num_clients, stream.num_rounds, stream.samples_per_class) == (10, None, 200)
    assert stream_settings("paper", "folder", 64, {}, GIVEN).samples_per_class == 50


@pytest.mark.parametrize(
    ("dataset", "size", "samples", "tests"),
    [
        ("emnist-byclass", 28, 200, 100),
        ("cifar-10", 32, 200, None),
        ("cifar-100", 32, 200, 100),
        ("imagenet-10", 64, 50, None),
        ("tinyimagenet-100", 64, 50, 50),
    ],
)
def test_the_paper_s_stream_depends_on_the_data_set(dataset: str, size: int, samples: int, tests: int | None):
    stream = stream_settings("paper", dataset, size, {}, GIVEN)
    assert (stream.samples_per_class, stream.test_samples_per_class) == (samples, tests)
    assert stream_settings("paper", dataset, size, {"test_samples_per_class": "7"}, GIVEN).test_samples_per_class == 7


@pytest.mark.parametrize("scenario", ["gradual", "circulating"])
@pytest.mark.parametrize("overlap", [0, 2, 4, 6])
def test_pictures_of_64_pixels_last_for_every_overlap_of_table_13_at_small_too(scenario: str, overlap: int):
    settings = stream_settings("small", "imagenet-10", 64, {}, {**GIVEN, "scenario": scenario, "overlap": overlap})
    train, test = (np.repeat(np.arange(10), count) for count in (1000, 300))
    assert Stream(settings, train, test, 10).num_rounds == settings.num_rounds == 20
    assert settings.samples_per_class == 50


def test_pictures_of_32_pixels_keep_the_samples_of_small():
    assert stream_settings("small", "cifar-10", 32, {}, GIVEN).samples_per_class == 100


@pytest.mark.parametrize("preset", SETTINGS)
def test_mfcl_draws_photographs_as_bright_as_photographs_at_every_size(preset: str):
    photographs = method_from(METHODS["mfcl"], TASKS["cifar-10"], preset, {})
    assert (photographs.pixel_mean, photographs.pixel_std) == (-0.05, 0.5)
    clothes = method_from(METHODS["mfcl"], FASHION, preset, {})
    assert (clothes.pixel_mean, clothes.pixel_std) == (-0.428, 0.706)


def test_what_the_operator_gives_goes_before_the_preset():
    stream = stream_settings(
        "tiny",
        "fashion-mnist",
        28,
        {"samples_per_class": "7", "local_epochs": "1"},
        {**GIVEN, "num_clients": 5, "num_rounds": None},
    )
    assert (stream.samples_per_class, stream.num_clients, stream.seed) == (7, 5, 3)
    assert stream.num_rounds == SIZES["tiny"].num_rounds


def test_overrides_become_values_of_the_field_s_type():
    texts = split_overrides(["gate=false", "gate_threshold=0.5", "local_epochs=3", "start_from=personalised"])
    method = method_from(METHODS["pfedgrp"], FASHION, "small", texts)
    assert method.gate is False
    assert (method.gate_threshold, method.local_epochs, method.start_from) == (0.5, 3, "personalised")


def test_an_override_may_hold_an_equals_sign():
    assert split_overrides(["key=a=b"]) == {"key": "a=b"}


@pytest.mark.parametrize("text", ["gate", "=1", ""])
def test_an_override_without_key_or_value_is_refused(text: str):
    with pytest.raises(SettingsError, match="expected KEY=VALUE"):
        split_overrides([text])


def test_an_override_given_twice_is_refused():
    with pytest.raises(SettingsError, match="given twice"):
        split_overrides(["gate=true", "gate=false"])


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("local_epoch", "3", "did you mean 'local_epochs'"),
        ("sample_per_class", "3", "did you mean 'samples_per_class'"),
        ("task", "x", "no such setting"),
        ("local_epochs", "many", "local_epochs=many: expected a whole number"),
        ("gate", "perhaps", "expected true or false"),
        ("start_from", "nowhere", "start_from is 'nowhere'"),
    ],
)
def test_an_override_that_the_method_cannot_take_is_refused(key: str, value: str, complaint: str):
    with pytest.raises(SettingsError, match=complaint):
        method_from(METHODS["pfedgrp"], FASHION, "small", {key: value})


def test_a_value_of_the_wrong_type_for_the_stream_is_refused():
    with pytest.raises(SettingsError, match="samples_per_class=few"):
        stream_settings("small", "fashion-mnist", 28, {"samples_per_class": "few"}, GIVEN)
    with pytest.raises(SettingsError, match="num_rounds=none: expected a whole number or null"):
        stream_settings("small", "fashion-mnist", 28, {"num_rounds": "none"}, GIVEN)


def test_an_unknown_preset_is_refused_with_the_nearest_name():
    with pytest.raises(SettingsError, match="did you mean 'small'"):
        stream_settings("smal", "fashion-mnist", 28, {}, GIVEN)


def test_the_task_is_no_setting():
    assert "task" not in method_fields(METHODS["fedavg"])


def test_defaults_are_compared_with_what_results_have():
    """A package's lists, tables and tuples were told in a table's report as if somebody had changed them."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Yard:
        task: object
        steps: int
        layers: tuple[int, ...] = (64, 32)
        shares: list[float] = dataclasses.field(default_factory=list)
        by_class: dict[int, float] = dataclasses.field(default_factory=lambda: {3: 0.5})

    assert default_settings(Yard) == {"layers": [64, 32], "shares": [], "by_class": {"3": 0.5}}


def test_the_docs_say_what_small_changes():
    """Diffusion models apart, which `small` is not meant for."""
    text = (Path(__file__).parents[4] / "docs/experiments.md").read_text(encoding="utf-8")
    rows = text.split("| of | setting: `paper` -> `small` |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    told: dict[str, dict[str, tuple[str, str]]] = {}
    for names, changes in (row.strip("| ").split(" | ") for row in rows):
        for method in re.findall(r"`([\w-]+)`", names):
            found = re.findall(r"`(\w+)` (\S+) -> ([^\s,]+)", changes)
            told.setdefault(method, {}).update({key: (paper, small) for key, paper, small in found})
    shared = told["fedavg"]
    for method, changes in told.items():
        paper, small = (settings_of(method_from(METHODS[method], FASHION, preset, {})) for preset in ("paper", "small"))
        changed = {key for key in paper if paper[key] != small[key] and not key.startswith("ddpm_")}
        listed = {**{key: values for key, values in shared.items() if key in paper}, **changes}
        assert changed == listed.keys(), method
        for key, values in listed.items():
            kind = type(paper[key])
            assert (kind(values[0]), kind(values[1])) == (paper[key], small[key]), (method, key)
