"""A person draws a box into each of thirty frames with the mouse, and the next model finds what it did not before."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from replayfleet.edge_client.flow import Shown
from replayfleet.models.specs import DetectionSpec
from tests.support.browser import Browser, Page
from tests.support.studio_world import taught

TASK = DetectionSpec(3, 64, 96, ("car", "bike"), anchors=((0.25, 0.3),), width=8, stride=16, max_boxes=3)
WIDTH, HEIGHT, SIDE, NUM_LABELS = 192, 128, 44, 30
SEEN = """(() => {
  const picture = at("frozen"), [w, h] = [picture.naturalWidth, picture.naturalHeight];
  const canvas = document.createElement("canvas"); canvas.width = w; canvas.height = h;
  const drawing = canvas.getContext("2d"); drawing.drawImage(picture, 0, 0);
  const pixels = drawing.getImageData(0, 0, w, h).data, box = [w, h, 0, 0];
  let red = 0;
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
    const [r, , b] = pixels.slice(4 * (y * w + x), 4 * (y * w + x) + 3);
    if (Math.abs(r - b) < 90) continue;
    red += r > b ? 1 : -1;
    box[0] = Math.min(box[0], x); box[1] = Math.min(box[1], y);
    box[2] = Math.max(box[2], x + 1); box[3] = Math.max(box[3], y + 1);
  }
  const stage = at("boxes").getBoundingClientRect(), scale = Math.min(stage.width / w, stage.height / h);
  return { red: red > 0, box, inner: [w * scale / stage.width, h * scale / stage.height], size: [w, h] };
})()"""


def film(folder: Path) -> str:
    """Write pictures of one red car or blue bike each, somewhere on a grey road."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(60):
        pixels = rng.normal(110, 12, (HEIGHT, WIDTH, 3))
        left, top = rng.integers(0, WIDTH - SIDE), rng.integers(0, HEIGHT - SIDE)
        pixels[top : top + SIDE, left : left + SIDE] += (-80, -60, 110) if number % 2 else (110, -60, -80)  # BGR
        cv2.imwrite(str(folder / f"{number:03d}.png"), np.clip(pixels, 0, 255).astype(np.uint8))
    return f"images://{folder}?rate=20&loop=true"


def truth(pixels: np.ndarray) -> tuple[int, np.ndarray]:
    """Return what a picture shows: its class, and its box in pixels."""
    red, blue = pixels[..., 0].astype(int), pixels[..., 2].astype(int)
    rows, columns = np.nonzero(abs(red - blue) > 90)
    box = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    return int(red[rows, columns].mean() < blue[rows, columns].mean()), box


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    width, height = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    both = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return float(both / (sum(areas) - both))


def share_found(seen: list[Shown]) -> float:
    """Of the newest pictures those in which the surest answer is the thing, its boxes half overlapping at least."""
    newest = [one for one in seen[-40:] if one.prediction is not None]
    found = 0
    for one in newest:
        answers, (class_id, box) = one.prediction.answers, truth(one.picture.pixels)
        if len(answers):
            surest = int(answers.confidences.argmax())
            found += answers.class_ids[surest] == class_id and overlap(answers.corners[surest], box) >= 0.5
    return found / len(newest)


def draw_one(page: Page) -> None:
    """Look at the frozen frame, take away what the model thinks, and draw what is there."""
    page.wait("!busy && shown && at('frozen').complete && at('frozen').naturalWidth > 0")
    before = page.run("JSON.stringify([shown.camera, shown.frame])")
    for _ in range(TASK.max_boxes):
        if page.run("editor.boxes.length"):
            page.press("]")
            page.press("Delete")
    seen = page.run(SEEN)
    page.press("1" if seen["red"] else "2")

    def at(x: float, y: float) -> tuple[float, float]:
        (w, h), inner = seen["size"], seen["inner"]
        return 0.5 + (x / w - 0.5) * inner[0], 0.5 + (y / h - 0.5) * inner[1]

    left, top, right, bottom = seen["box"]
    page.drag("#boxes", at(left, top), at(right, bottom))
    assert page.run("editor.boxes.length") == 1
    page.press("Enter")
    page.wait(f"!busy && JSON.stringify(shown && [shown.camera, shown.frame]) !== {json.dumps(before)}")


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.usefixtures("served_here")
def test_thirty_drawn_frames_raise_what_the_next_detector_finds(browser: Browser, tmp_path: Path) -> None:
    with taught(tmp_path, TASK, film(tmp_path / "film"), NUM_LABELS, local_epochs="40", batch_size="5") as (
        world,
        client,
        server,
        seen,
    ):
        world.until(lambda: len(seen) > 45 and bool(server.url))
        page = browser.page(server.url)
        for _ in range(NUM_LABELS):
            draw_one(page)
        assert page.run("at('missing').textContent") == "Enough for the next round"
        before = share_found(seen)
        assert page.complaints() == []
        page.close()
        world.until(lambda: client.client.finished)
        count = len(seen)
        world.until(lambda: len(seen) > count + 60)
        assert share_found(seen) > max(0.5, before)
