"""What an upload that comes after its round is worth, in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from support.tiny_method import TinyDownload, TinyUpload

from replayfleet.federation.methods.steps.late import drawn_back, share_of

UPLOADED, NEWEST = {"w": torch.tensor([8.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])}
GENERATOR = {3: {"g": torch.tensor([7.0])}}


@pytest.mark.parametrize(("rounds_late", "share"), [(0, 1.0), (1, 1 / math.sqrt(2)), (3, 0.5), (15, 0.25)])
def test_the_share_falls_with_the_root_of_the_rounds(rounds_late: int, share: float) -> None:
    assert share_of(rounds_late) == pytest.approx(share)


def test_a_model_is_drawn_back_to_the_newest_served_one_and_what_was_met_stays() -> None:
    upload, newest = TinyUpload(UPLOADED, GENERATOR, 5), TinyDownload(NEWEST, {"w": torch.tensor([100.0, 100.0])})
    found = drawn_back(upload, newest, 3)
    assert found.task["w"].tolist() == [4.0, 2.0]
    assert (found.generators[3]["g"].tolist(), found.count) == ([7.0], 5)
    assert (upload.task["w"].tolist(), NEWEST["w"].tolist()) == ([8.0, 0.0], [0.0, 4.0]), "neither was written to"


def test_a_model_whose_head_has_grown_since_stays_as_it_is() -> None:
    grown = TinyDownload({"w": torch.zeros(3)}, {"w": torch.zeros(3)})
    assert drawn_back(TinyUpload(UPLOADED), grown, 1).task["w"].tolist() == [8.0, 0.0]


def test_what_is_not_finite_stays_so_for_screening_to_find() -> None:
    broken = TinyUpload({"w": torch.tensor([math.nan, math.inf])})
    assert not drawn_back(broken, TinyDownload(NEWEST, NEWEST), 1).task["w"].isfinite().any()
