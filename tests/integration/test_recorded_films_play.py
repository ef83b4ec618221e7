"""What ``--record`` writes plays in a browser, where there is one; the codec is proved without one in unit tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from replayfleet.edge_client.operator.display.recorder import Film

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
PAGE = """<body><video muted src="film.webm"></video><script>
const film = document.querySelector("video"), say = text => document.body.append(text);
film.onerror = () => say("refused: " + film.error.message);
film.ontimeupdate = () => { if (film.currentTime > 0.2) say(`plays ${film.videoWidth}x${film.videoHeight}`); };
film.onloadeddata = () => film.play();
</script>"""
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


@pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")
def test_a_browser_plays_a_recorded_film(tmp_path: Path) -> None:
    film = Film(tmp_path / "film.webm", 10.0, (480, 346))
    for level in range(0, 200, 20):
        film.write(np.full((346, 480, 3), level, np.uint8))
    film.close()
    (tmp_path / "page.html").write_text(PAGE)
    own = (f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--dump-dom")
    command = [CHROMIUM, *FLAGS, *own, (tmp_path / "page.html").as_uri()]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    assert "plays 480x346" in page
