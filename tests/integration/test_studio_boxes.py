"""Boxes in the studio: drawn with the mouse or by keys, corrected, learned as they were drawn, and taken back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replayfleet.edge_client.operator.studio.app import StudioServer
from tests.support.browser import AXE, Browser, Page
from tests.support.studio_device import HEIGHT, TASK, WIDTH, Device


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


@pytest.fixture
def page(device: Device, browser: Browser) -> Iterator[Page]:
    with contextlib.closing(StudioServer(device.studio, "127.0.0.1", 0)) as server:
        while not server.url:
            pass
        made = browser.page(server.url)
        yield made
        assert made.complaints() == []
        made.close()


def wait_for(page: Page, frame: int) -> None:
    """Wait until a frame is there, and the page has heard that its picture is: it takes no box before."""
    page.wait(f"!busy && shown && shown.frame === {frame} && !at('frozen').hidden && isThere()")


def test_a_mouse_draws_and_corrects_and_what_it_drew_is_learned(device: Device, page: Page, tmp_path: Path) -> None:
    device.see(1, (10, 10, 50, 50))
    wait_for(page, 1)
    assert page.run("editor.boxes.length") == 1
    assert page.run("document.querySelectorAll('rect.guessed').length") == 1
    # The stage is wider than the picture: shares of the picture are found over its edges.
    inner = page.run(
        "(r => { const s = Math.min(r.width / 192, r.height / 128); return [192 * s / r.width, 128 * s / r.height]; })"
        "(at('boxes').getBoundingClientRect())"
    )

    def at(x: float, y: float) -> tuple[float, float]:
        return 0.5 + (x / WIDTH - 0.5) * inner[0], 0.5 + (y / HEIGHT - 0.5) * inner[1]

    page.press("2")
    page.drag("#boxes", at(96, 64), at(144, 120))
    page.drag("#boxes", at(30, 30), at(50, 40))  # the model's box, moved
    page.picture(tmp_path / "boxes.png")
    page.drag("#boxes", at(70, 60), at(80, 70))  # its lower right corner
    assert page.run("at('drawn').textContent").startswith("To be learned: car (1), bike (1)")
    page.click("#done")
    page.wait("!busy && now.labels.have === 1")
    found = device.learned()
    assert np.allclose(found, [[0, 30, 20, 80, 70], [1, 96, 64, 144, 120]], atol=1.5), found
    page.press("u")
    wait_for(page, 1)
    assert device.learned() == []
    assert page.run("editor.boxes.length") == 2  # as they were sent


def test_keys_alone_do_all_that_a_mouse_does(device: Device, page: Page) -> None:
    device.see(1)
    device.see(2)
    wait_for(page, 1)
    page.press("n")
    for key, shift in (("ArrowRight", False), ("ArrowDown", True)):
        page.press(key, shift=shift)
    page.press("2")
    page.press("n")
    page.press("Delete")
    page.press("u")  # it is there again
    page.press("u")  # it was never added
    page.press("]")
    assert page.run("at('drawn').textContent").startswith("To be learned: bike (1), chosen: bike, 48 by 34 pixels")
    page.press("Enter")
    wait_for(page, 2)
    assert np.allclose(device.learned(), [[1, 74, 48, 122, 82]], atol=0.01)
    page.press("Enter")  # nothing is to be seen in the second
    page.wait("now.num_waiting === 0 && now.labels.pictures === 2")


@pytest.mark.skipif(not AXE.exists(), reason="axe isn't there: make test-console fetches it with npm")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_an_accessibility_checker_finds_no_fault(device: Device, page: Page, width: int, dark: bool) -> None:
    page.look(width=width, dark=dark)
    assert page.faults() == [], "while no frame waits"
    device.see(1, (10, 10, 50, 50))
    wait_for(page, 1)
    page.press("n")
    assert page.faults() == [], "while a box is drawn"
    page.press("Enter")
    page.wait("now.num_waiting === 0")
    assert page.faults() == [], "after a label"


def test_the_class_that_was_reached_with_tab_keeps_the_focus_for_the_next_frame(device: Device, page: Page) -> None:
    names = tuple(f"class {number}" for number in range(62))  # ten have a key
    device.studio._known = lambda: replace(device.known(), class_names=names, max_boxes=None)
    device.studio.label = lambda camera, frame, name: device.studio.skip(camera, frame)
    page.call("Fetch.enable", patterns=[{"urlPattern": "*/frame?*frame=2*"}])
    for frame in (1, 2, 3):
        device.see(frame, (10, 10, 50, 50))
    wait_for(page, 1)
    page.run("at('classes').children[40].focus()")
    page.press("Enter")
    page.wait("!busy && shown.frame === 2")
    page.run("new Promise(requestAnimationFrame)")
    assert page.run("document.activeElement.ariaDisabled") == "true"
    page.press("Enter")  # its picture hasn't come
    page.call("Fetch.continueRequest", requestId=held_back(page))
    wait_for(page, 2)
    assert page.run("document.activeElement.innerText") == "class 40"
    page.wait("document.activeElement.ariaDisabled === 'false'")
    page.press("Enter")
    wait_for(page, 3)


def test_more_boxes_than_are_learned_of_a_picture_are_not_sent(device: Device, page: Page) -> None:
    device.see(1, *((x, 10, x + 20, 50) for x in (10, 50, 90, 130)))
    wait_for(page, 1)
    assert page.run("editor.boxes.length") == TASK.max_boxes
    assert page.run("at('add').disabled")
    page.press("n")
    assert page.run("editor.boxes.length") == TASK.max_boxes
    sent = page.run(
        """fetch("/api/boxes", {method: "POST", body: JSON.stringify({camera: "front", frame: 1,
        boxes: Array(4).fill({class: "car", box: [1, 1, 9, 9]})})
        }).then(async (answer) => [answer.status, (await answer.json()).error])"""
    )
    assert sent[0] == 422
    assert "expected at most 3" in sent[1]
    page._browser.events.clear()  # the browser writes the refusal down


def held_back(page: Page) -> str:
    """Return the number of the picture that is asked for and held back."""
    while True:
        for event in page.events("Fetch.requestPaused"):
            return str(event["requestId"])
        page.run("0")


def test_the_longest_names_make_the_page_no_wider_than_a_telephone(device: Device, page: Page) -> None:
    known = replace(device.known(), client="c" * 64, class_names=("x" * 200, "bike"))
    device.studio._known = lambda: known
    page.look(width=320)
    device.see(1, (10, 10, 50, 50))
    wait_for(page, 1)
    page.wait("at('where').textContent.startsWith('ccc') && at('drawn').textContent.includes('xxx')")
    assert page.run("document.documentElement.scrollWidth") == 320


PLACES = """((selector, ...texts) => texts.map((text) => {
  const range = document.createRange(), walker = document.createTreeWalker(document.querySelector(selector), 4);
  while (walker.nextNode() && !walker.currentNode.data.includes(text));
  range.setStart(walker.currentNode, walker.currentNode.data.indexOf(text));
  range.setEnd(walker.currentNode, range.startOffset + text.length);
  return range.getBoundingClientRect().left;
}))"""
"""Where texts begin on the screen, in an element that has them."""


def test_numbers_stand_behind_a_name_from_right_to_left(device: Device, page: Page) -> None:
    name = "\N{HEBREW LETTER ALEF}\N{HEBREW LETTER BET}\N{HEBREW LETTER GIMEL}"
    known = [replace(device.known(), class_names=(name, "bike"), max_boxes=most) for most in (3, None)]
    device.studio._known = lambda: known[0]
    device.see(1, (10, 10, 50, 50))
    wait_for(page, 1)
    page.press("n")
    assert_in_turn(page, "#drawn", name, "(2)", "48 by")
    assert_in_turn(page, "figcaption", "front:", name, "30 %")
    known.reverse()
    page.wait("at('guess').textContent.includes('sure')")
    assert_in_turn(page, "#guess", "The model says", name, ", 30 %")


def assert_in_turn(page: Page, selector: str, *texts: str) -> None:
    places = page.run(f"{PLACES}({json.dumps(selector)}, ...{json.dumps(texts)})")
    assert places == sorted(places), texts


def test_a_camera_that_gives_no_pictures_any_more_is_not_shown_as_live(device: Device, page: Page) -> None:
    device.see(1, (10, 10, 50, 50))
    page.wait("at('cameras').innerText.includes('front: car 30 %')")
    device.now += 40
    page.wait("at('cameras').innerText.includes('front: no picture for 40 s')")
    device.see(2, (10, 10, 50, 50))
    page.wait("at('cameras').innerText.includes('front: car 30 %')")


def test_nothing_is_learned_of_a_picture_that_has_not_come(device: Device, page: Page) -> None:
    page.call("Fetch.enable", patterns=[{"urlPattern": "*/frame?*"}])
    device.see(1, (10, 10, 50, 50))
    page.wait("shown && shown.frame === 1 && !busy")
    assert page.run("at('nothing').innerText") == "The picture is on its way."
    for key in ("n", "1", "Enter"):
        page.press(key)
    assert page.run("at('done').disabled && !busy && now.labels.have === 0")
    page.call("Fetch.continueRequest", requestId=held_back(page))
    wait_for(page, 1)
    assert not page.run("at('done').disabled || at('frozen').hidden")
    page.press("Enter")
    page.wait("now.labels.have === 1")


def test_a_key_is_not_taken_for_a_frame_that_took_the_place_of_one_that_was_too_old(device: Device, page: Page) -> None:
    device.see(1)
    wait_for(page, 1)
    page.run("performance.now = () => 5000, 0")
    device.now += 60
    device.see(2)
    wait_for(page, 2)
    page.press("Enter")
    assert page.run("!busy && now.labels.pictures === 0")
    page.run("performance.now = () => 9000, 0")
    page.wait("!at('done').disabled")
    page.press("Enter")
    page.wait("now.labels.pictures === 1")
