from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.tiny_fleet import TinyFleet

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.transport.broker import PrivateBroker
from tests.support.memory_broker import Faults


@pytest.mark.parametrize("seed", range(3))
def test_lost_repeated_and_reordered_messages_change_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.fsync", lambda handle: None)
    calm, rough = TinyFleet(tmp_path / "calm"), TinyFleet(tmp_path / "rough", deadline_s=100_000)
    rough.broker.faults = Faults(random.Random(seed), drop=0.05, duplicate=0.3, reorder=True)
    try:
        calm.run()
        rough.run(for_s=3000)
        assert rough.outcome() == calm.outcome()
    finally:
        calm.close()
        rough.close()


class NeverBack(PrivateBroker):
    """Is asked for again and again, and doesn't start."""

    num_asked = 0

    def keep(self) -> bool:
        self.num_asked += 1
        raise SettingsError("its port is taken")


def test_an_aggregator_looks_after_its_own_broker_and_goes_on_where_that_does_not_start(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path)
    fleet.service.stop()
    fleet.private = broker = NeverBack()
    fleet.new_service()
    try:
        fleet.run()
        assert broker.num_asked > 1
    finally:
        fleet.close()
