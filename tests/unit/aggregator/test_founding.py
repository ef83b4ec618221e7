"""A run that began with a model goes on with it: over restarts, and whatever is cleaned up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.client_world import World

from replayfleet.aggregator.founding import Fleet, initial_of, take_up
from replayfleet.aggregator.rounds.machine import RoundRules
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.beginning import first_download
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.service.fleet.spec import make_spec, method_of, with_later_settings
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from tests.support.toy import TOY


@pytest.fixture
def fleet(tmp_path: Path) -> Callable[[Parameters | None], Fleet]:
    (tmp_path / "world").mkdir()
    world = World(tmp_path / "world")
    world.close()
    return lambda given: dataclasses.replace(world.fleet, initial=given)


def opened(folder: Path) -> tuple[AggregatorStore, DiskBlobStore]:
    (folder / "fleet").mkdir(exist_ok=True)
    return AggregatorStore(folder / "fleet"), DiskBlobStore(folder / "fleet" / "blobs")


def test_the_model_is_kept_and_another_one_refused(fleet: Callable[[Parameters | None], Fleet], tmp_path: Path) -> None:
    drawn = first_download(fleet(None).method, 9).task_parameters
    other = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in drawn.items()}
    store, blobs = opened(tmp_path)
    assert take_up(store, blobs, fleet(drawn))
    assert store.initial().digest in store.referenced()  # type: ignore[union-attr]
    for again in (drawn, None):
        assert not take_up(store, blobs, fleet(again))
        found = initial_of(store, blobs)
        assert found is not None
        assert all(torch.equal(found[name], drawn[name]) for name in drawn)
    with pytest.raises(SettingsError, match="began with another model; start without --initial"):
        take_up(store, blobs, fleet(other))


def test_a_run_that_began_at_random_takes_no_model_later(
    fleet: Callable[[Parameters | None], Fleet], tmp_path: Path
) -> None:
    store, blobs = opened(tmp_path)
    assert take_up(store, blobs, fleet(None))
    assert initial_of(store, blobs) is None
    with pytest.raises(SettingsError, match="began with another model"):
        take_up(store, blobs, fleet(first_download(fleet(None).method, 9).task_parameters))


def test_a_fleet_of_an_earlier_version_goes_on_with_its_own_spec(tmp_path: Path) -> None:
    world = World(tmp_path)
    asked, spec = world.fleet, world.spec
    settings = {name: value for name, value in with_later_settings(spec).settings.items() if name != "robust"}
    older = msgspec.structs.replace(spec, settings=settings)  # as of a version that knew no robust averages
    world.fleet = dataclasses.replace(asked, spec=older)
    founded = world.start_aggregator("older")
    founded.stop()
    world.fleet = asked
    again = world.start_aggregator("older")
    assert again._parts.spec == older, "clients' states are bound to it"
    again.stop()
    other = msgspec.structs.replace(spec, settings=spec.settings | {"robust": "median"})
    world.fleet = dataclasses.replace(asked, spec=other)
    with pytest.raises(
        SettingsError,
        match=r"its run has robust=none, now robust=median is asked for; go on with --set robust=none, or",
    ):
        world.start_aggregator("older")
    others = dict.fromkeys(("local_epochs", "batch_size"), 7) | dict.fromkeys(("learning_rate", "momentum"), 0.7)
    many = msgspec.structs.replace(spec, settings=spec.settings | others | {"robust": "median"})
    world.fleet = dataclasses.replace(asked, spec=many)
    with pytest.raises(SettingsError, match=r"has \d+ other settings .* go on with the --settings \(tiny, say\)"):
        world.start_aggregator("older")
    newer = msgspec.structs.replace(spec, settings=spec.settings | {"colour": "red"})
    store, blobs = opened(tmp_path)
    store.found(newer, 0.0)
    with pytest.raises(SettingsError, match="no setting 'colour', which a later version of Replayfleet wrote; update"):
        take_up(store, blobs, asked)
    world.close()


def test_levers_that_a_fleet_began_without_stay_off_at_both_ends() -> None:
    spec = make_spec("yard", "pfedgrp-plus", TOY, preset="tiny", overrides={}, run_seed=0)
    levers = {"upload_growth": 1.0, "smooth_share": 0.0, "detail_share": 0.0}
    older = msgspec.structs.replace(
        spec, settings={name: value for name, value in spec.settings.items() if name not in levers}
    )
    assert {name: getattr(method_of(older), name) for name in levers} == levers
    assert with_later_settings(older).settings == with_later_settings(spec).settings | levers
    assert method_of(spec).smooth_share == 1.0


def test_a_setting_that_came_later_and_changes_nothing_is_not_sent_to_devices_of_before() -> None:
    spec = make_spec("yard", "pfedgrp-plus", TOY, preset="paper", overrides={"robust": "median"}, run_seed=0)
    idle = {"models_travel_as", "sub_generators_travel_as", "learning_rate_schedule", "dp_noise_multiplier"}
    assert not idle & spec.settings.keys()
    assert (spec.settings["robust"], spec.settings["smooth_share"]) == ("median", 1.0)
    assert idle <= with_later_settings(spec).settings.keys()
    off = make_spec("yard", "pfedgrp-plus", TOY, preset="paper", overrides={"smooth_share": 0.0}, run_seed=0)
    assert off.settings["smooth_share"] == 0.0, "its default is another one, which some earlier versions would take"


@pytest.mark.parametrize(
    ("names", "said"),
    [(["dark", "dark\u200b"], "characters that nobody sees"), (["caf\u00e9", "cafe\u0301"], "which look alike")],
)
def test_a_fleet_begins_with_names_that_are_seen_and_one_of_before_goes_on(
    names: list[str], said: str, tmp_path: Path
) -> None:
    world = World(tmp_path)
    task = {**world.spec.task, "class_names": names}
    world.fleet = dataclasses.replace(world.fleet, spec=msgspec.structs.replace(world.spec, task=task))
    store, blobs = opened(tmp_path)
    with pytest.raises(SettingsError, match=said):
        take_up(store, blobs, world.fleet)
    store, blobs = opened(tmp_path)
    assert store.spec() is None
    store.found(world.fleet.spec, 0.0)  # as a version did that looked at no names
    assert not take_up(store, blobs, world.fleet)
    store.close()
    world.close()


def test_a_method_whose_rounds_alternate_takes_no_late_uploads() -> None:
    parts: Any = dict.fromkeys(("spec", "sampler", "exporter"))
    one, two = (METHODS["fedgp"](task=TOY, two_messages=two) for two in (False, True))
    Fleet(method=one, rules=RoundRules(late_rounds=1), **parts)
    Fleet(method=two, rules=RoundRules(), **parts)
    with pytest.raises(SettingsError, match="two kinds by turns"):
        Fleet(method=two, rules=RoundRules(late_rounds=1), **parts)
