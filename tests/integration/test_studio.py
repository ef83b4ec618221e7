"""A person in a browser teaches a client with the keyboard alone, and its fleet's next model knows it."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from replayfleet.edge_client.flow import Shown
from replayfleet.models.specs import TaskSpec
from tests.support.browser import Browser, Page
from tests.support.studio_world import taught

TASK = TaskSpec(3, 32, ("car", "bike"), generator_width=1)
NUM_LABELS = 30
LABEL = """(red => {
  if (busy || !isSeen()) return null;
  const canvas = document.createElement("canvas"), frame = JSON.stringify([shown.camera, shown.frame]);
  canvas.width = canvas.height = 1;
  const drawing = canvas.getContext("2d"); drawing.drawImage(at("frozen"), 0, 0, 1, 1);
  const [r, g, b] = drawing.getImageData(0, 0, 1, 1).data, isRed = r > b;
  document.dispatchEvent(new KeyboardEvent("keydown", { key: isRed !== red ? "s" : isRed ? "1" : "2" }));
  return [frame, isRed]; })(%s)"""
"""Looks and presses a key at once: between two calls a slow machine may have the frame take its leave."""


def film(folder: Path) -> str:
    """Write red cars and blue bikes, without a word of what they are."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(41):  # a prime: whichever are looked at, both colours are among them
        colour = np.array((60, 60, 220) if number % 2 else (220, 60, 60))  # BGR
        pixels = np.clip(colour + rng.normal(0, 25, (120, 160, 3)), 0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / f"{number:03d}.png"), pixels)
    return f"images://{folder}?rate=20&loop=true"


def share_right(seen: list[Shown]) -> float:
    """Return the mean over both colours: which frames a slow machine comes to see may all be of one."""
    right: dict[bool, list[bool]] = {True: [], False: []}
    for one in seen:
        if one.prediction is not None:
            is_bike = bool(one.picture.pixels[..., 2].mean() > one.picture.pixels[..., 0].mean())
            right[is_bike].append(bool(one.prediction.answers.class_ids[0] == is_bike))
    return sum(sum(each[-10:]) / 10 for each in right.values()) / 2


def version(shown: Shown) -> int:
    return 0 if shown.prediction is None else shown.prediction.model_version


def label_one(page: Page, *, red: bool) -> str:
    """Skip frames until one is red, or isn't, and label it; returns which it was."""
    while True:
        page.wait("!busy && isSeen()")
        said = page.run(LABEL % json.dumps(red))
        if said is None:
            continue
        frame, is_red = said
        page.wait(f"!busy && JSON.stringify(shown && [shown.camera, shown.frame]) !== {json.dumps(frame)}")
        if is_red is red:
            return str(frame)


@pytest.mark.learning
@pytest.mark.usefixtures("served_here")
def test_thirty_frames_labelled_by_key_raise_the_accuracy_of_the_next_model(browser: Browser, tmp_path: Path) -> None:
    with taught(tmp_path, TASK, film(tmp_path / "film"), NUM_LABELS, local_epochs="30", learning_rate="0.003") as (
        world,
        client,
        server,
        seen,
    ):
        world.until(lambda: len(seen) > 40 and bool(server.url))
        page = browser.page(server.url)
        labelled = label_one(page, red=True)
        page.press("u")
        page.wait("now.labels.have === 0 && !now.undo")
        is_it = f"one => JSON.stringify([one.camera, one.frame]) === {json.dumps(labelled)}"
        page.wait(f"!busy && [shown].some({is_it}) || !now.waiting.some({is_it})")  # too old, on a slow machine
        for number in range(NUM_LABELS):
            label_one(page, red=number % 3 < 2)  # in turn: where many wait, the least sure may all be of one colour
        assert page.run("at('missing').textContent") == "Enough for the next round"
        world.until(lambda: version(seen[-1]) > 0)
        before, first = share_right(seen), version(seen[-1])
        page.wait("document.querySelector('#cameras img').naturalWidth > 0")
        for width in (1280, 390):
            page.look(width=width)
            assert page.run("document.documentElement.scrollWidth") <= width
            for dark in (False, True):
                page.look(width=width, dark=dark)
                page.picture(tmp_path / f"studio-{width}-{'dark' if dark else 'light'}.png")
        assert page.complaints() == []
        page.close()
        world.until(lambda: client.client.finished and sum(version(one) > first for one in seen) > 100)
        assert share_right([one for one in seen if version(one) > first]) > max(0.8, before)
        assert client.counts.num_failed == 0
