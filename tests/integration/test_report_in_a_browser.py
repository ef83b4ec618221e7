"""A demo's report in a browser: whoever reads it with keys, a screen reader or in other colours reads all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.finished_demo import finished_demo, tiny_images

from replayfleet.scripts.demo.report import write_report
from tests.support.browser import AXE, CHROMIUM, Page, chromium

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("demo")
    report = write_report(finished_demo(folder / "out"), tiny_images())
    with chromium(folder) as browser:
        yield browser.page(report.path.as_uri())


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
