from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit import packing, travel
from replayfleet.federation.methods.kit.beginning import first_download
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.pfedgrp_records import Download, Upload
from replayfleet.federation.methods.steps.memory import Memory
from replayfleet.federation.methods.steps.screening import answers_of
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import SubGenerator
from replayfleet.models.specs import TaskSpec

TASK = TaskSpec(1, 28, ("a", "b", "c"), "cifar", 4)
PFEDGRP = METHODS["pfedgrp"](task=TASK, models_travel_as="int8", sub_generators_travel_as="float16")
EXACT = METHODS["pfedgrp"](task=TASK)


def moved(parameters: Parameters, by: float, seed: int) -> Parameters:
    rng = torch.Generator().manual_seed(seed)
    return {
        key: one + by * torch.randn(one.shape, generator=rng) if one.is_floating_point() and one.ndim > 1 else one
        for key, one in parameters.items()
    }


def a_round() -> tuple[Memory, Upload, Download]:
    download = first_download(PFEDGRP, 3)
    rng = torch.Generator().manual_seed(1)
    generator = {"weight": torch.randn(6, 5, generator=rng)}
    state = Memory({0: SubGenerator(generator, {}, ())}, {0: 4})
    upload = Upload(moved(download.average, 1e-3, 2), {0: generator}, {0: 4}, 4)
    return state, upload, download


def test_a_fleet_that_agreed_on_nothing_changes_nothing() -> None:
    state, upload, download = a_round()
    done = travel.sent(EXACT, answers_of(TASK), state, upload, download, {})
    assert done.state is state
    assert done.upload is upload
    assert not done.rounded
    assert travel.published(EXACT, answers_of(TASK), "state", {"cam": download}, lambda _: download)[1:] == (
        {"cam": download},
        [],
    )


def test_an_upload_lies_within_half_a_step_of_what_was_trained() -> None:
    state, upload, download = a_round()
    done = travel.sent(PFEDGRP, answers_of(TASK), state, upload, download, {})
    one = done.rounded["task"]
    assert one.base in (download.average, download.personalised)
    assert one.steps
    for key, exact in upload.task_parameters.items():
        found = done.upload.task_parameters[key]
        assert found.dtype == exact.dtype
        if key in one.steps:
            assert float((found - exact).abs().max()) <= 0.51 * one.steps[key]
        else:
            assert torch.equal(found, exact)


def test_what_an_upload_lost_is_added_to_the_next() -> None:
    state, upload, download = a_round()
    first = travel.sent(PFEDGRP, answers_of(TASK), state, upload, download, {})
    second = travel.sent(PFEDGRP, answers_of(TASK), state, upload, download, first.remainder)
    lost = [
        float(sum((done.upload.task_parameters[key] - upload.task_parameters[key]).mean() for done in dones))
        for dones in ([first, first], [first, second])
        for key in ["head.weight" if "head.weight" in upload.task_parameters else next(iter(first.remainder["task"]))]
    ]
    assert abs(lost[1]) < abs(lost[0])  # what is sent in two rounds comes nearer to what was trained


def test_what_is_owed_waits_for_the_next_upload_that_is_rounded() -> None:
    state, upload, download = a_round()
    owed = travel.sent(PFEDGRP, answers_of(TASK), state, upload, download, {}).remainder
    said = iter((torch.ones(1), torch.zeros(1)))  # by the exact model and by the rounded one
    exact = travel.sent(PFEDGRP, lambda _: next(said), state, upload, download, owed)
    assert packing.same_bits(exact.upload.task_parameters, upload.task_parameters)
    assert exact.remainder == owed


def test_the_clients_own_sub_generator_is_the_one_that_it_sent() -> None:
    state, upload, download = a_round()
    done = travel.sent(PFEDGRP, answers_of(TASK), state, upload, download, {})
    kept, offered = done.state.sub_generators[0].generator, done.upload.sub_generators[0]
    assert packing.same_bits(kept, offered)
    assert torch.equal(offered["weight"], offered["weight"].half().float())
    assert not torch.equal(offered["weight"], upload.sub_generators[0]["weight"])


def test_a_remainder_lies_beside_the_state_and_is_found_again() -> None:
    state, upload, download = a_round()
    done = travel.sent(PFEDGRP, answers_of(TASK), state, upload, download, {})
    stored = travel.with_remainder(done.state.pack(), done.remainder)
    assert travel.remainder_among(stored)["task"] is done.remainder["task"]
    assert Memory.unpack(stored) == done.state


def test_a_remainder_of_other_shapes_is_left_behind() -> None:
    state, upload, download = a_round()
    owed = {"task": {key: torch.ones(1, 1) for key in upload.task_parameters}}
    with_it, without = (travel.sent(PFEDGRP, answers_of(TASK), state, upload, download, o) for o in (owed, {}))
    assert packing.same_bits(with_it.upload.task_parameters, without.upload.task_parameters)


@pytest.mark.parametrize("how", ["int8", "float16"])
@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_a_diverged_model_travels_as_it_is_so_that_admission_sees_it(how: str, worst: float) -> None:
    state, upload, download = a_round()
    method = replace(PFEDGRP, models_travel_as=how)
    broken = {key: torch.full_like(one, worst) if one.ndim > 1 else one for key, one in upload.task_parameters.items()}
    done = travel.sent(method, answers_of(TASK), state, replace(upload, task_parameters=broken), download, {})
    assert "task" not in done.rounded
    assert done.upload.task_parameters is broken


def test_a_model_whose_answers_rounding_would_change_travels_as_it_is() -> None:
    state, upload, download = a_round()
    for drift, taken in ((0.09, True), (0.11, False)):
        said = iter([torch.tensor([2.0, -1.0]), torch.tensor([2.0, -1.0 + 2 * drift])])
        done = travel.sent(PFEDGRP, lambda _, said=said: next(said), state, upload, download, {})  # type: ignore[misc]
        assert ("task" in done.rounded) is taken


def test_a_personalised_model_is_a_difference_and_state_and_downloads_agree() -> None:
    before = first_download(PFEDGRP, 3)
    average = moved(before.average, 1e-3, 4)
    own = {name: moved(average, 1e-4, place) for place, name in enumerate(("a", "b"))}
    records = {
        name: replace(_record(parameters), personalised=parameters, task_parameters=moved(average, 1e-3, 9))
        for name, parameters in own.items()
    }
    state = PFEDGRP.AggregatorState(clients=records, average=average)
    downloads = {name: PFEDGRP.download_for(state, name, before) for name in own}
    new_state, new_downloads, rounded = travel.published(PFEDGRP, answers_of(TASK), state, downloads, lambda _: before)
    assert len(rounded) == 3
    assert new_downloads["a"].average is new_downloads["b"].average is new_state.average
    by_parameters = {id(one.parameters): one for one in rounded}
    for name in own:
        assert new_state.clients[name].personalised is new_downloads[name].personalised
        assert by_parameters[id(new_downloads[name].personalised)].base is new_state.average
        again = PFEDGRP.download_for(new_state, name, before)
        assert packing.same_bits(again.personalised, new_downloads[name].personalised)
    assert by_parameters[id(new_state.average)].base is before.average


def _record(parameters: Parameters):  # noqa: ANN202
    from replayfleet.federation.methods.pfedgrp_records import ClientRecord

    return ClientRecord(parameters, {}, {0: 1})
