from __future__ import annotations

import io

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from replayfleet.federation.simulator.charts import Curve, accuracy_chart, loss_chart


def pixels(picture: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)


def has_colour(picture: bytes, colour: tuple[int, int, int]) -> bool:
    return bool((np.abs(pixels(picture) - np.array(colour)).max(axis=-1) < 8).any())


BLUE, ORANGE = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)


def test_every_run_has_a_colour_of_its_own():
    first = Curve("one", [0.2, 0.4, 0.6])
    alone = accuracy_chart([first], title="t")
    both = accuracy_chart([first, Curve("two", [0.6, 0.4])], title="t")
    assert has_colour(alone, BLUE)
    assert not has_colour(alone, ORANGE)
    assert has_colour(both, BLUE)
    assert has_colour(both, ORANGE)


def test_changes_of_the_stream_and_clients_show():
    curve = Curve("one", [0.2, 0.4, 0.6])
    plain = accuracy_chart([curve], title="t")
    marked = accuracy_chart([curve], title="t", changes=[2], change_name="c")
    banded = accuracy_chart([Curve("one", curve.accuracy, {"a": [0.1] * 3, "b": [0.9] * 3})], title="t")
    assert len({plain, marked, banded}) == 3


def test_what_a_program_chose_for_its_own_charts_changes_none_of_ours():
    def both() -> tuple[bytes, bytes | None]:
        return accuracy_chart([Curve("one", [0.2, 0.4])], title="t"), loss_chart([("one", [[2.0, 1.0]])], title="t")

    plain, theirs = both(), {"text.usetex": True, "font.size": 30.0}
    with mpl.rc_context(theirs):
        assert both() == plain
        assert {name: mpl.rcParams[name] for name in theirs} == theirs


@pytest.mark.parametrize("num_rounds", [1, 2, 150])
def test_any_number_of_rounds_can_be_drawn(num_rounds: int):
    picture = accuracy_chart([Curve("one", [0.5] * num_rounds)], title="t", changes=range(1, num_rounds))
    assert pixels(picture).shape[0] > 400


def test_a_chart_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one curve"):
        accuracy_chart([], title="t")


def test_losses_are_drawn_of_those_that_have_any():
    falling = [[2.0, 0.5], [], [1.0]]
    picture = loss_chart([("none", [[], []]), ("one", falling)], title="t", changes=[1], change_name="c")
    assert picture is not None
    assert has_colour(picture, BLUE)
    assert not has_colour(picture, ORANGE)
    once = loss_chart([("one", [[2.0], [1.5], [], [1.0]])], title="t")
    assert once is not None
    above_the_legend = pixels(once)[:500]
    assert (np.abs(above_the_legend - np.array(BLUE)).max(axis=-1) < 8).any(), "rounds of one epoch are no lines"
    assert loss_chart([("one", [[2.0, 0.0, -1.0]])], title="t") is not None, "no logarithm of it"
    assert loss_chart([("none", [[], []])], title="t") is None
    assert loss_chart([], title="t") is None
