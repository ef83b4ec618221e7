"""What pages show while the loop is busy."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from replayfleet.aggregator.console.charts import Chart, Charts
from replayfleet.aggregator.console.watch import OLD_S, Watch
from tests.support.watched_fleet import watched_fleet

CHART = Chart("fleet", "Accuracy", (("mean", (0.2, 0.4), "own"),), 0)


class SlowControl:
    """A loop that answers when it is let."""

    def __init__(self) -> None:
        self.may, self.asked = threading.Event(), threading.Event()

    def look(self) -> Any:
        self.asked.set()
        self.may.wait(60)
        raise ConnectionError


def test_a_page_does_not_wait_for_a_busy_loop_and_says_when_it_is_old(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("replayfleet.aggregator.console.watch.PATIENCE_S", 0.01)
    now = [100.0]
    watch, busy = Watch(watched_fleet(tmp_path / "fleet"), clock=lambda: now[0]), SlowControl()
    first = watch.number()
    watch.control = busy  # type: ignore[assignment]
    now[0] += 2
    assert watch.number() == first, "what was known a moment ago is shown"
    assert busy.asked.is_set()
    now[0] += OLD_S
    notices = watch.read(lambda fleet, story, number: fleet.notices)
    assert notices == ("The aggregator hasn't answered for a while: this is what it said last.",)
    busy.may.set()
    looking = watch._looking
    if looking is not None:
        looking.join(60)
    assert "hasn't answered" not in str(watch.read(lambda fleet, story, number: fleet.notices))


def test_a_chart_is_drawn_beside_the_page_once_and_the_former_one_shown_meanwhile() -> None:
    drawn, times = threading.Event(), []
    charts = Charts(lambda: (times.append(1), drawn.set()))
    assert charts.svg(CHART) == ""
    assert drawn.wait(60)
    assert "<svg" in (first := charts.svg(CHART))
    newer = Chart("fleet", "Accuracy", (("mean", (0.2, 0.4, 0.9), "own"),), 0)
    drawn.clear()
    assert charts.svg(newer) == first
    assert drawn.wait(60)
    assert "90.0" in charts.svg(newer)
    assert charts.svg(CHART) == first
    assert len(times) == 2
