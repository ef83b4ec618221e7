from __future__ import annotations

from replayfleet.federation.backoff import LONGEST_S, fleet_backoff


def test_a_fleet_tries_again_at_least_every_three_seconds_and_not_in_step() -> None:
    members = [fleet_backoff() for _ in range(20)]
    delays = [[member.next_s() for member in members] for _ in range(12)]
    assert LONGEST_S <= 3.0
    for row in delays:
        assert 0 < min(row) < max(row) <= LONGEST_S
    assert max(delays[0]) <= 0.5
    assert min(delays[-1]) >= LONGEST_S / 2
