"""One member sends as fast as the loopback takes it, all that quotas are for, to a real aggregator over mosquitto.

What the numbers are on an idle machine: ``benchmarks/flood.py``. Here no bound depends on how busy the machine is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.flood import ATTACKS
from support.flooded_fleet import MEMBER, flooded_fleet

from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.aggregator.presence import MAX_NEWCOMERS
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.federation.wire.transport.broker import find_mosquitto

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="needs mosquitto")

LIMIT_S = 240.0
MEMORY_MB = 100.0
WARNINGS_PER_S = 10.0
NUM_HONEST = 3


@pytest.mark.parametrize(
    "kinds",
    [list(ATTACKS), *(pytest.param([kind], marks=pytest.mark.slow) for kind in ATTACKS)],
    ids=lambda kinds: "all" if len(kinds) > 1 else kinds[0],
)
def test_memory_rounds_and_log_stand_a_member_that_floods(tmp_path: Path, kinds: list[str]) -> None:
    with flooded_fleet(tmp_path) as fleet:
        calm = fleet.rounds(1.0, 3, LIMIT_S)
        flooded = fleet.flooded(kinds, 3.0, 3, LIMIT_S)
        after = fleet.rounds(0.0, 1, LIMIT_S)
        print(f"\n{kinds}: {calm}\n{flooded}\n{after}")  # noqa: T201
        assert flooded.memory_mb - calm.memory_mb <= MEMORY_MB
        assert flooded.warnings <= WARNINGS_PER_S * flooded.seconds
        fleet.stop()
    events = list(read_journal(tmp_path / "aggregator"))
    assert all(event["client"] in {MEMBER, "unknown clients"} for event in events if event["event"] == "client muted")
    store = AggregatorStore(tmp_path / "aggregator", read_only=True)
    assert len(store.clients()) <= NUM_HONEST + 1 + MAX_NEWCOMERS
    assert store.members() == {"cam-1", "cam-2", "cam-3", MEMBER}
    store.close()
