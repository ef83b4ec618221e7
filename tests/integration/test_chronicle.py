"""What the journal has of a round of many clients."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_fleet import TinyFleet

from replayfleet.aggregator import chronicle
from replayfleet.aggregator.operator.journal import read_journal


@pytest.mark.parametrize(("most", "written"), [(3, 3), (2, 1)])
def test_of_many_clients_mixtures_the_largest_shares_are_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, written: int
) -> None:
    monkeypatch.setattr(chronicle, "MAX_ALL", most)
    monkeypatch.setattr(chronicle, "MAX_LARGEST", 1)
    made = TinyFleet(tmp_path, num_rounds=1)
    made.run()
    made.close()
    (committed,) = (event for event in read_journal(tmp_path / "aggregator") if event["event"] == chronicle.COMMITTED)
    assert sorted(committed["weights"]) == ["cam-1", "cam-2", "cam-3"]
    assert {len(shares) for shares in committed["weights"].values()} == {written}
