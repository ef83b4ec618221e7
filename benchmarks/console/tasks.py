"""What operators come to the console for: seconds and clicks of a script in Chromium, on a fleet that runs.

A fleet of three whose round waits for cam-3, which said that it refused its model. The script reads what a page says
and clicks what is there; it begins at the first page, logged in. People take longer: they read.

    python -m benchmarks.console.tasks [--out benchmarks/results/console_tasks.json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from support.tiny_fleet import TinyFleet  # noqa: E402
from support.waiting_fleet import waiting_fleet  # noqa: E402

from benchmarks.harness import run  # noqa: E402
from replayfleet.federation.service.web.access import add_token  # noqa: E402
from tests.support.browser import Page, chromium  # noqa: E402
from tests.support.consoles import console  # noqa: E402

MAX_CLICKS, MAX_S = 4, 20.0


@dataclass(frozen=True)
class Task:
    """One of them, done."""

    what: str
    clicks: int
    seconds: float
    answer: str


class Operator:
    """Counts clicks of one page."""

    def __init__(self, page: Page, home: str) -> None:
        self.page, self._home, self._clicks = page, home, 0
        self.done: list[Task] = []

    def click(self, selector: str, until: str) -> None:
        """Click, once more where it led nowhere: a page that is renewed may move what was under the mouse."""
        reached, here = f"document.readyState === 'complete' && ({until})", self.page.run("location.href")
        for _ in range(2):
            self._clicks += 1
            self.page.click(selector)
            with contextlib.suppress(AssertionError):
                self.page.wait(f"location.href !== {json.dumps(here)} || ({reached})", 15.0)
                break
        self.page.wait(reached)

    def task(self, what: str, do: Callable[[], str]) -> None:
        self.page.open(self._home)
        self._clicks, began = 0, time.perf_counter()
        answer = do()
        self.done.append(Task(what, self._clicks, round(time.perf_counter() - began, 2), answer))


def text_of(page: Page, selector: str) -> str:
    found = f"document.querySelector({json.dumps(selector)})"
    page.wait(f"{found} !== null")  # a page that is on its way has none yet
    return str(page.run(f"{found}.innerText"))


def _has(text: str) -> str:
    return f"document.body.innerText.includes({json.dumps(text)})"


def operated(folder: Path) -> list[Task]:
    """Do all tasks; the fleet's state is asserted by what pages say."""
    with waiting_fleet(folder) as fleet, logged_in(fleet, folder) as operator:
        page = operator.page

        def why_it_waits() -> str:
            operator.click('nav a[href="/round"]', "location.pathname === '/round'")
            return text_of(page, ".people li")

        def who_rejects() -> str:
            assert "download refused" in text_of(page, "#rows tbody tr")
            operator.click("#rows tbody tr a", "location.pathname === '/clients/cam-3'")
            return text_of(page, "#head .note.drifted")

        def exclude() -> str:
            operator.click("#rows tbody tr a", "location.pathname === '/clients/cam-3'")
            operator.click("#exclude", _has("takes no part from now on"))
            operator.click("#do", _has("Done: exclude cam-3"))
            page.wait("document.querySelector('h1').innerText.includes('excluded')")
            return text_of(page, "h1")

        def bring_back() -> str:
            operator.click('#rows a[href="/clients/cam-3"]', "location.pathname === '/clients/cam-3'")
            operator.click("#readmit", _has("takes part again"))
            operator.click("#do", _has("Done: readmit cam-3"))
            page.wait("!document.querySelector('h1').innerText.includes('excluded')")
            return text_of(page, "h1")

        def roll_back() -> str:
            operator.click('nav a[href="/round"]', "location.pathname === '/round'")
            operator.click("#rollback-all", "document.querySelector('#do') !== null || " + _has("Nothing was changed"))
            if page.run("document.querySelector('#do') === null"):
                return page.text()
            operator.click("#do", _has("Done: rollback"))
            return text_of(page, ".note.quiet")

        operator.task("find out why the round waits", why_it_waits)
        operator.task("find the client that rejects models, and why", who_rejects)
        operator.task("exclude it", exclude)
        operator.task("bring it back", bring_back)
        operator.task("roll the fleet back a version", roll_back)
        return operator.done


@contextmanager
def logged_in(fleet: TinyFleet, folder: Path) -> Iterator[Operator]:
    """Yield an operator whose browser is logged in."""
    tokens = folder / "tokens.toml"
    token = add_token(tokens, "anna", "operator")
    fleet.service.loop.put("a refusal", lambda now: _refuse(fleet))
    with chromium(folder) as browser, console(folder / "aggregator", "--tokens", str(tokens)) as address:
        page = browser.page(f"{address}/login")
        page.write(token)
        page.press("Enter")
        page.wait("document.querySelector('#rows') !== null")
        yield Operator(page, address + "/")


def _refuse(fleet: TinyFleet) -> None:
    fleet.service._parts.journal.add(
        "download refused", round=0, client="cam-3", version=1, reason="probe-mismatch", detail="it answers differently"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tasks = operated(Path(folder))
    for task in tasks:
        print(f"{task.seconds:6.2f} s  {task.clicks} clicks  {task.what}: {' '.join(task.answer.split())[:90]}")
    return {"tasks": [asdict(task) for task in tasks]}


def missed(result: dict[str, Any]) -> list[str]:
    """Return what took too long."""
    return [one["what"] for one in result["tasks"] if one["clicks"] > MAX_CLICKS or one["seconds"] > MAX_S]


if __name__ == "__main__":
    run(measure, __doc__, failed=missed)
