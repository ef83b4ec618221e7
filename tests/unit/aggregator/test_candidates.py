from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

import pytest

from replayfleet.aggregator.candidates import MAX_TRIES, settle

Breaks = Callable[[set[str]], bool]


def attempt_that(breaks: Breaks):
    """Return an aggregation that fails when ``breaks`` says so of who takes part, and a record of its calls."""
    calls: list[str] = []

    def attempt(uploads: Mapping[str, int]) -> str:
        calls.append("".join(uploads))
        if breaks(set(uploads)):
            raise ValueError(f"broken by {''.join(uploads)}")
        return "".join(uploads)

    return attempt, calls


def settled(clients: str, breaks: Breaks):
    attempt, calls = attempt_that(breaks)
    outcome, left_out = settle(dict.fromkeys(clients, 0), attempt, attempt, attempt)
    return outcome, left_out, calls


def test_a_round_that_succeeds_is_tried_once():
    assert settled("abc", lambda who: False) == ("abc", {}, ["abc"])


def test_whoever_breaks_it_alone_is_left_out_and_the_error_told():
    outcome, left_out, _ = settled("abcd", lambda who: bool(who & {"b", "d"}))
    assert outcome == "ac"
    assert left_out == {
        "b": "with it the round can't be aggregated: ValueError: broken by b",
        "d": "with it the round can't be aggregated: ValueError: broken by d",
    }


def test_whoever_breaks_it_only_among_others_is_found_by_leaving_one_out():
    outcome, left_out, _ = settled("abcd", lambda who: "c" in who and len(who) > 1)
    assert outcome == "abd"
    assert list(left_out) == ["c"]


def test_where_nobody_goes_with_anybody_all_are_left_out():
    outcome, left_out, calls = settled("abc", lambda who: True)
    assert outcome is None
    assert sorted(left_out) == ["a", "b", "c"]
    assert len(calls) <= 8


def test_where_no_upload_goes_at_all_none_of_them_is_blamed():
    outcome, left_out, _ = settled("a", lambda who: True)
    assert left_out == {"a": "with no upload can the round be aggregated: ValueError: broken by a"}
    assert outcome is None


def test_of_one_client_that_breaks_it_nothing_is_left():
    outcome, left_out, calls = settled("a", lambda who: True)
    assert outcome is None
    assert list(left_out) == ["a"]
    assert calls == ["a"]


def test_without_candidates_nothing_is_tried():
    assert settled("", lambda who: True) == (None, {}, [])


@pytest.mark.parametrize("culprits", [{"000"}, {"199"}, {"080", "081"}, {"000", "100", "199"}])
def test_of_many_clients_those_alone_are_left_out_that_go_with_nobody(culprits: set[str]):
    clients = [f"{number:03}" for number in range(200)]
    attempt, calls = attempt_that(lambda who: bool(who & culprits) and len(who) > 1)
    _, left_out = settle(dict.fromkeys(clients, 0), attempt, lambda who: None, attempt)
    assert left_out.keys() == culprits
    assert len(calls) <= 2 + MAX_TRIES


def test_looking_for_groups_ends_after_its_tries():
    clients = [f"{number:03}" for number in range(200)]
    attempt, calls = attempt_that(lambda who: len(who) > 1)
    outcome, left_out = settle(dict.fromkeys(clients, 0), attempt, lambda who: None, attempt)
    assert outcome is None
    assert len(left_out) == 200
    assert len(calls) <= 2 + MAX_TRIES


TORCH_SAYS = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.parametrize("error", [OSError("disk full"), MemoryError(), RuntimeError(TORCH_SAYS)])
def test_errors_of_disk_and_memory_are_nobodys(error: Exception):
    def attempt(uploads: Mapping[str, int]) -> NoReturn:
        raise error

    with pytest.raises(type(error)):
        settle({"a": 0, "b": 0}, attempt, attempt, attempt)
