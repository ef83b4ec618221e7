"""A demo's report in a browser: whoever reads it with keys, a screen reader or in other colours reads all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.driven_demo import driven_demo
from support.finished_demo import finished_demo, tiny_images

from replayfleet.scripts.carla.facts import read_facts
from replayfleet.scripts.carla.page import page as drive_page
from replayfleet.scripts.demo.report import write_report
from tests.support.browser import AXE, Browser, Page


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Page:
    report = write_report(finished_demo(tmp_path_factory.mktemp("demo") / "out"), tiny_images())
    return browser.page(report.path.as_uri())


@pytest.mark.skipif(not AXE.exists(), reason="axe isn't there: make test-console fetches it with npm")
@pytest.mark.parametrize("share", ["", "70", "75", "75.1", "100"])
@pytest.mark.parametrize("dark", [False, True])
def test_an_accessibility_checker_finds_no_fault(page: Page, dark: bool, share: str) -> None:
    page.look(width=320 if share else 1280, dark=dark)
    if share:
        page.run(
            "document.querySelectorAll('.heat tbody td').forEach(cell => {"
            f"cell.classList.toggle('dark', {share} > 75); cell.style.setProperty('--share', '{share}%') }})"
        )
    assert page.faults() == []


def test_bytes_on_the_wire_say_their_way_in_a_word_and_not_by_colour_alone(page: Page) -> None:
    page.look(width=320)
    bars = page.run("[...document.querySelectorAll('.bytes .bar')].map(bar => [bar.className, bar.innerText.trim()])")
    assert len(bars) > 1
    assert [kind.split()[1] for kind, _ in bars] == [told.split()[2] for _, told in bars], bars
    assert page.run("[...document.querySelectorAll('.bar span')].every(one => one.getBoundingClientRect().right < 320)")


@pytest.mark.skipif(not AXE.exists(), reason="axe isn't there: make test-console fetches it with npm")
@pytest.mark.parametrize("width", [320, 1280])
def test_nor_with_the_report_of_a_drive(browser: Browser, tmp_path: Path, width: int) -> None:
    report = tmp_path / "report.html"
    report.write_text(drive_page(read_facts(driven_demo(tmp_path / "demo")), {"crops": [], "detection": []}))
    page = browser.page(report.as_uri(), width=width)
    assert page.faults() == []
    page.close()
