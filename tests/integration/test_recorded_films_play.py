"""What ``--record`` writes plays in a browser, where there is one; the codec is proved without one in unit tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from replayfleet.edge_client.operator.display.recorder import Film
from tests.support.browser import Browser

PAGE = """<body><video muted src="film.webm"></video><script>
const film = document.querySelector("video");
let said = "";
film.onerror = () => { said = "refused: " + film.error.message; };
film.ontimeupdate = () => { if (film.currentTime > 0.2) said ||= `plays ${film.videoWidth}x${film.videoHeight}`; };
film.onloadeddata = () => film.play();
</script>"""


def test_a_browser_plays_a_recorded_film(tmp_path: Path, browser: Browser) -> None:
    film = Film(tmp_path / "film.webm", 10.0, (480, 346))
    for level in range(0, 200, 20):
        film.write(np.full((346, 480, 3), level, np.uint8))
    film.close()
    (tmp_path / "page.html").write_text(PAGE)
    page = browser.page((tmp_path / "page.html").as_uri())
    page.wait("said !== ''")
    assert page.run("said") == "plays 480x346"
