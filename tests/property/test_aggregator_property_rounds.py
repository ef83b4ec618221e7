from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from replayfleet.aggregator.rounds.machine import Decision, Phase, RoundRules, Rounds

clients = st.sampled_from([f"cam-{i}" for i in range(6)])
arrivals = st.lists(clients, max_size=20)


def closed_with(rules: RoundRules, order: list[str]) -> tuple[tuple[str, ...], Phase]:
    rounds = Rounds(rules, 0)
    for client in order:
        rounds.accept(client)
    rounds.decide(rules.deadline_s)
    return rounds.accepted, rounds.phase


@given(arrivals, st.randoms(use_true_random=False), st.integers(1, 6))
def test_arrival_order_and_duplicates_change_nothing(order: list[str], random: random.Random, min_clients: int):
    rules = RoundRules(num_clients=6, min_clients=min_clients)
    repeated = [*order, *random.choices(order, k=5)] if order else []
    random.shuffle(repeated)
    assert closed_with(rules, repeated) == closed_with(rules, sorted(set(order)))


@given(st.lists(st.tuples(clients, st.integers(0, 500)), max_size=40), st.integers(1, 4), st.integers(1, 4))
def test_a_round_never_closes_below_its_minimum_and_always_at_its_quorum(
    steps: list[tuple[str, int]], num_clients: int, at_least: int
):
    rules = RoundRules(num_clients=num_clients, min_clients=min(at_least, num_clients), deadline_s=100)
    rounds, now = Rounds(rules, 0), 0
    for client, passed in steps:
        now += passed
        if not rounds.is_open:
            rounds.committed(now)
        rounds.accept(client)
        decision = rounds.decide(now)
        assert decision is not Decision.CLOSE_DEADLINE or len(rounds.accepted) >= rules.min_clients
        assert (decision is Decision.CLOSE_QUORUM) == (len(rounds.accepted) >= num_clients)
        assert rounds.remaining_s(now) <= rules.deadline_s
