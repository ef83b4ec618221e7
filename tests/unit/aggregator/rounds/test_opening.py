from __future__ import annotations

import math

import pytest

from replayfleet.aggregator.rounds.opening import Opening, Signs, parse_opening, since
from replayfleet.federation.errors import SettingsError

DAY_S, HOUR_S = 86400, 3600
MIDNIGHT = 20_000.0 * DAY_S
TWICE = parse_opening("14:30,02:00")


def looked(before: Signs, committed_h: float, now_h: float) -> Signs:
    """What a look says that comes after ``before``; hours after midnight."""
    committed_s, now_s = MIDNIGHT + committed_h * HOUR_S, MIDNIGHT + now_h * HOUR_S
    return Signs(0, now_s, since(before, committed_s, now_s))


@pytest.mark.parametrize(
    ("committed_h", "now_h", "left_h", "words"),
    [
        (1, 1.5, 0.5, "at 02:00 UTC"),
        (2, 2, 12.5, "at 14:30 UTC"),  # a round that ends on the minute waits for the next time
        (3, 14.5, 0, "at 14:30 UTC"),
        (15, 20, 6, "at 02:00 UTC"),
        (15, 60, 0, "at 02:00 UTC"),  # the time came while nobody ran: one round begins, not four
        (15 + 30 * 24, 1, 1, "at 02:00 UTC"),  # the clock was a month ahead, and was put right
    ],
)
def test_a_round_begins_at_the_first_time_after_the_one_before(
    committed_h: float, now_h: float, left_h: float, words: str
) -> None:
    signs = looked(Signs(), committed_h, now_h)
    assert (TWICE.left_s(signs), TWICE.awaits(signs)) == (left_h * HOUR_S, words)


def test_a_clock_that_was_behind_for_a_while_begins_no_round_when_it_is_put_right() -> None:
    signs = Signs()
    for now_h in (63.0, 16.0, 16.1, 63.5):
        signs = looked(signs, 63.0, now_h)
        assert TWICE.left_s(signs) > 0
    assert TWICE.left_s(signs) == 10.5 * HOUR_S, "02:00 of the day after"


def test_where_the_clock_was_ahead_the_first_time_after_it_was_put_right_comes() -> None:
    signs = Signs()
    for now_h in (40.0, 0.5, 1.0, 1.999):
        signs = looked(signs, 40.0, now_h)
        assert TWICE.left_s(signs) > 0
    for now_h in (2.0, 2.001, 2.5):
        signs = looked(signs, 40.0, now_h)
        assert (TWICE.left_s(signs), TWICE.awaits(signs)) == (0, "at 02:00 UTC")
        assert TWICE.because(signs) == "it was due at 02:00 UTC"


def test_samples_are_awaited_without_a_clock() -> None:
    opening = parse_opening("samples=500")
    assert opening.left_s(Signs(499)) == math.inf
    assert opening.left_s(Signs(500)) == 0
    assert opening.awaits(Signs(380)) == "when 120 more labelled samples wait at its members (380 of 500)"
    assert "folder:// and dataset:// count none" in opening.awaits(Signs())
    assert opening.awaits(Signs(499)) == "when 1 more labelled sample waits at its members (499 of 500)"


def test_a_member_whose_model_falls_is_awaited_without_a_clock() -> None:
    opening = parse_opening("accuracy=80")
    assert opening.left_s(Signs(10_000)) == math.inf
    assert opening.left_s(Signs(lowest=0.8, whose="cam-1")) == math.inf
    assert opening.left_s(Signs(lowest=0.799, whose="cam-1")) == 0
    assert opening.awaits(Signs()) == (
        "when a member's model answers less than 80.0% of its labels rightly (too few came yet to tell)"
    )
    assert opening.awaits(Signs(lowest=0.873, whose="cam-1")).endswith("rightly (87.3% of cam-1 is the lowest)")


def test_what_operators_write_is_understood_or_refused() -> None:
    assert parse_opening("by-hand") == Opening()
    assert Opening(times_s=(2 * HOUR_S, 14 * HOUR_S + 1800)) == TWICE
    assert parse_opening("02:00, 02:00") == Opening(times_s=(2 * HOUR_S,))
    assert parse_opening("accuracy=99.5") == Opening(accuracy=0.995)
    for wrong in (
        *("", "by hand", "samples=0", "samples=", "24:00", "2:00", "02:60", "02:00,", "02:00;14:00"),
        *("accuracy=0", "accuracy=100", "accuracy=0.8", "accuracy=80%", "accuracy="),
    ):
        with pytest.raises(SettingsError, match=r"open_rounds is .*, expected by-hand"):
            parse_opening(wrong)
