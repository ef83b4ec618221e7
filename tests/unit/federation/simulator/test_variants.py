from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.service.fleet.presets import TASKS
from replayfleet.federation.service.fleet.variants import VARIANTS, resolved
from replayfleet.federation.simulator.job import prepare, without_variant
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.settings import method_from
from replayfleet.federation.simulator.tables.paper import paper_table
from tests.support.image_sets import write_fashion_mnist

FASHION = TASKS["fashion-mnist"]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("preset", ["paper", "tiny"])
def test_every_variant_is_its_method_with_other_settings(name: str, preset: str) -> None:
    if name == "pfedgrp-ddpm":
        pytest.importorskip("diffusers")
    method, overrides = resolved(name, preset)
    changed = method_from(METHODS[method], FASHION, preset, overrides)
    plain = method_from(METHODS[method], FASHION, preset, {})
    assert changed != plain
    assert all(getattr(changed, key) == value for key, value in VARIANTS[name][1].items())


def test_no_variant_has_the_name_of_a_method() -> None:
    assert not VARIANTS.keys() & METHODS.keys()
    assert resolved("fedavg", "paper") == ("fedavg", {})


def options(tmp_path: Path, method: str, *overrides: str) -> RunSpec:
    write_fashion_mnist(tmp_path / "data", train_per_class=6, test_per_class=4)
    return RunSpec(
        method=method,
        scenario="circulating",
        dataset="fashion-mnist",
        preset="tiny",
        out=tmp_path / "out",
        clients=2,
        rounds=2,
        data_root=tmp_path / "data",
        overrides=["samples_per_class=3", "test_samples_per_class=1", *overrides],
        threads=1,
    )


def test_a_variant_runs_as_its_method_under_its_own_label(tmp_path: Path) -> None:
    job = prepare(options(tmp_path, "pfedgrp-as1"))
    assert job.identity["method"] == "pfedgrp"
    assert job.identity["settings"]["filter_replay"] is False
    assert job.spec.method == "pfedgrp-as1"
    assert job.headline.startswith("pfedgrp-as1 on fashion-mnist")


def test_the_operator_sees_whether_clients_store_real_samples(tmp_path: Path) -> None:
    assert prepare(options(tmp_path, "der-fedgp")).headline.endswith("clients store real samples")
    assert not prepare(options(tmp_path, "fedavg")).headline.endswith("real samples")


def test_what_the_operator_sets_wins_over_the_variant(tmp_path: Path) -> None:
    asked = without_variant(
        dataclasses.replace(options(tmp_path, "pfedgrp-v1", "sub_generator_epochs=2"), preset="paper")
    )
    assert "sub_generator_epochs=2" in asked.overrides
    assert "first_sub_generator_epochs=1000" in asked.overrides
    assert "sub_generator_epochs=100" not in asked.overrides


def test_the_first_versions_lengths_belong_to_the_papers_size() -> None:
    def epochs(preset: str) -> tuple[int, int]:
        method = method_from(METHODS["pfedgrp"], FASHION, preset, resolved("pfedgrp-v1", preset)[1])
        return method.first_sub_generator_epochs, method.sub_generator_epochs

    assert epochs("paper") == (1000, 100)
    assert epochs("tiny")[1] == method_from(METHODS["pfedgrp"], FASHION, "tiny", {}).sub_generator_epochs == 2
    assert epochs("tiny")[0] <= 2


def test_the_first_version_is_the_same_in_its_tables_and_by_its_name() -> None:
    _, settings = resolved("pfedgrp-v1", "paper")
    assert settings["filter_replay"] == "False"  # its section 4 takes replay as it comes
    (row,) = [row for row in paper_table("v1-1").rows if row.label == "pFedGRP"]
    of_table = row.settings_for("mnist", "paper")
    assert {key: text.lower() for key, text in settings.items()} == of_table


def test_an_unknown_name_is_refused_and_the_nearest_variant_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="did you mean 'pfedgrp-as"):
        prepare(options(tmp_path, "pfedgrp-as9"))


def test_a_sampler_for_a_method_without_sub_generators_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="fedavg has no sub-generators that sampler 'onnx' could run"):
        prepare(dataclasses.replace(options(tmp_path, "fedavg"), sampler="onnx"))
    assert prepare(dataclasses.replace(options(tmp_path, "pfedgrp"), sampler="onnx"))


def test_a_sampler_that_cannot_run_diffusion_models_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    with pytest.raises(SettingsError, match="take --sampler eager"):
        prepare(dataclasses.replace(options(tmp_path, "pfedgrp-ddpm"), sampler="onnx"))
