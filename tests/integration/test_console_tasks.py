"""What operators come for, done by a script in Chromium on a fleet that runs, with the clicks that it takes."""

from __future__ import annotations

import pytest

from benchmarks.console.tasks import MAX_CLICKS, Task, operated
from tests.support.browser import CHROMIUM

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    return operated(tmp_path_factory.mktemp("tasks"))


def test_every_task_is_done_with_few_clicks(done: list[Task]) -> None:
    assert {task.what: task.clicks for task in done if task.clicks > MAX_CLICKS} == {}
    assert len(done) == 5
