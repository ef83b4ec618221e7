"""Charts of runs are drawn where a test looks at them, and nowhere else: each costs as much as a small run."""

from __future__ import annotations

import pytest

from replayfleet.federation.simulator import job
from replayfleet.federation.simulator.tables import report


@pytest.fixture
def drawn() -> None:
    """Draw this test's charts."""


@pytest.fixture(autouse=True)
def _charts_in_no_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn" in request.fixturenames:
        return
    for module in (job, report):
        monkeypatch.setattr(module, "accuracy_chart", lambda *_, **__: b"\x89PNG")
