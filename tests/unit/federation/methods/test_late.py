"""What an upload that comes after its round is worth, in closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.tiny_method import TinyDownload, TinyUpload

from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.late import drawn_back, share_of
from tests.support.toy import TOY

UPLOADED, NEWEST = {"w": torch.tensor([8.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])}
Served = type("Served", (), {})
FromTheAverage = type("FromTheAverage", (), {"start_from": "average"})
GENERATOR = {3: {"g": torch.tensor([7.0])}}


@pytest.mark.parametrize(("rounds_late", "share"), [(0, 1.0), (1, 1 / math.sqrt(2)), (3, 0.5), (15, 0.25)])
def test_the_share_falls_with_the_root_of_the_rounds(rounds_late: int, share: float) -> None:
    assert share_of(rounds_late) == pytest.approx(share)


def test_a_model_is_drawn_back_to_the_newest_served_one_and_what_was_met_stays() -> None:
    upload, newest = TinyUpload(UPLOADED, GENERATOR, 5), TinyDownload(NEWEST, {"w": torch.tensor([100.0, 100.0])})
    found = drawn_back(Served(), upload, newest, 3)
    assert found.task["w"].tolist() == [4.0, 2.0]
    assert (found.generators[3]["g"].tolist(), found.count) == ([7.0], 5)
    assert (upload.task["w"].tolist(), NEWEST["w"].tolist()) == ([8.0, 0.0], [0.0, 4.0]), "neither was written to"


def test_it_is_drawn_to_what_its_client_would_have_begun_with() -> None:
    newest = TinyDownload({"w": torch.tensor([100.0, 100.0])}, NEWEST)
    assert drawn_back(FromTheAverage(), TinyUpload(UPLOADED), newest, 3).task["w"].tolist() == [4.0, 2.0]
    method = METHODS["pfedgrp"](task=TOY)
    download = method.initial_download(torch.Generator())
    own = {name: torch.full_like(tensor, 9) for name, tensor in download.personalised.items()}
    late = drawn_back(method, method.Upload(own, {}, {0: 1}, 1, 0, 0), replace(download, personalised=own), 3)
    for name, tensor in late.task_parameters.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, (download.average[name] + 9) / 2)


def test_tensors_are_made_when_they_are_asked_for_and_a_count_of_batches_is_that_of_the_heavier() -> None:
    counts = [{"w": torch.tensor([0.0]), "n": torch.tensor(one)} for one in (7, 3)]
    late = [drawn_back(Served(), TinyUpload(counts[1]), TinyDownload(counts[0], counts[0]), t).task for t in (3, 15)]
    assert [int(one["n"]) for one in late] == [3, 7]
    assert late[0]["w"] is not late[0]["w"]
    assert (list(late[0]), len(late[0])) == (["w", "n"], 2)


def test_a_model_whose_head_has_grown_since_stays_as_it_is() -> None:
    grown = TinyDownload({"w": torch.zeros(3)}, {"w": torch.zeros(3)})
    assert drawn_back(Served(), TinyUpload(UPLOADED), grown, 1).task["w"].tolist() == [8.0, 0.0]


def test_what_is_not_finite_stays_so_for_screening_to_find() -> None:
    broken = TinyUpload({"w": torch.tensor([math.nan, math.inf])})
    assert not drawn_back(Served(), broken, TinyDownload(NEWEST, NEWEST), 1).task["w"].isfinite().any()
