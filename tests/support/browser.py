"""A real Chromium that tests drive over its DevTools protocol, through pipes: no port, no package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", "--ignore-certificate-errors",
)  # fmt: skip
AXE = Path(__file__).parents[2] / "runs" / "npm" / "node_modules" / "axe-core" / "axe.min.js"
"""The accessibility checker, where ``make test-console`` has fetched it with npm."""
PATIENCE_S = 60.0
KEYS = {
    "Enter": (13, "\r"), "Tab": (9, ""), "Space": (32, " "), "Escape": (27, ""), "Delete": (46, ""), "]": (221, "]"),
    "ArrowLeft": (37, ""), "ArrowUp": (38, ""), "ArrowRight": (39, ""), "ArrowDown": (40, ""),
} | {key: (ord(key.upper()), key) for key in "12nsu"}  # fmt: skip


class Browser:
    """One Chromium; ``page`` opens a tab."""

    def __init__(self, profile: Path) -> None:
        (to_it, our_end), (from_it, its_end) = os.pipe(), os.pipe()
        # It reads 3 and writes 4, which may be taken here: the ends lie above while a shell moves them.
        above = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_it, its_end)]
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{above[0]} 4>&{above[1]}', "bash", *command],
            pass_fds=above,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_it, its_end, *above):
            os.close(end)
        self._out, self._in, self._rest, self._number = our_end, from_it, b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            answer = self._receive(PATIENCE_S)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def _receive(self, wait_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], wait_s)[0], "Chromium says nothing"
            more = os.read(self._in, 1 << 20)
            assert more, "Chromium ended"
            self._rest += more
        line, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(line))

    def page(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"], target)
        page.look(width=width, height=height, dark=dark)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.open(url)
        return page

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._out)
        os.close(self._in)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Set the window's size and the theme."""
        self._width = width
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def open(self, url: str) -> None:
        """Go there, and wait until it is loaded."""
        self.run("window.isTheFormerPage = true")
        self.call("Page.navigate", url=url)
        self.wait("!window.isTheFormerPage && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return what an expression, or a promise of it, gives."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, json.dumps(answer["exceptionDetails"])[:2000]
        return answer["result"].get("value")

    def wait(self, condition: str, wait_s: float = PATIENCE_S) -> None:
        """Wait until a script's expression is true."""
        until = time.monotonic() + wait_s
        while True:
            with contextlib.suppress(AssertionError):  # while one page takes another's place
                if self.run(condition):
                    return
            assert time.monotonic() < until, f"never true: {condition}\n{self.text()}"
            time.sleep(0.05)

    def faults(self) -> list[Any]:
        """What axe finds wrong with the page as it is now: rule, weight, and up to three elements."""
        self.run(AXE.read_text(encoding="utf-8") + "; 0")
        found = self.run(
            "axe.run().then(r => r.violations.map(v => [v.id, v.impact, v.nodes.slice(0, 3).map(n => n.html)]))"
        )
        return list(found)

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def click(self, selector: str) -> None:
        """Click with the mouse where it is, as a person would; it has to be visible."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"document.readyState === 'complete' && {find} !== null")
        self.run(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2, r.width])({find}.getBoundingClientRect())")
        assert box[2] > 0, f"{selector} can't be seen"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def drag(self, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Hold the mouse's button from one place to another, both as shares of an element's width and height."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{find}.scrollIntoView({{block: 'center'}})")
        box = self.run(f"(r => [r.x, r.y, r.width, r.height])({find}.getBoundingClientRect())")
        (x, y), (to_x, to_y) = ((box[0] + box[2] * at[0], box[1] + box[3] * at[1]) for at in (start, end))
        middle = ((x + to_x) / 2, (y + to_y) / 2)
        steps = (("mousePressed", (x, y)), ("mouseMoved", middle), ("mouseMoved", (to_x, to_y)))
        for kind, (now_x, now_y) in (*steps, ("mouseReleased", (to_x, to_y))):
            self.call("Input.dispatchMouseEvent", type=kind, x=now_x, y=now_y, button="left", buttons=1, clickCount=1)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = KEYS[key]
        name, held = " " if key == "Space" else key, {"modifiers": 8 if shift else 0, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, code=key, text=text, **held)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, code=key, **held)

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def events(self, method: str) -> list[dict[str, Any]]:
        """What this tab told of a kind so far: the parameters of each event."""
        own = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in own if event["method"] == method]

    def complaints(self) -> list[str]:
        """What the console of this tab was told so far: refused by its policy, not found, thrown."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in {"warning", "error"}:
                found.append(str(event["params"]["entry"]["text"]))
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"])[:500])
        return found

    def picture(self, path: Path) -> None:
        """Write the whole page as PNG."""
        height = int(self.run("document.documentElement.scrollHeight"))
        clip = {"x": 0, "y": 0, "width": self._width, "height": height, "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Run a browser with a profile below ``folder``."""
    with contextlib.closing(Browser(folder / "profile")) as browser:
        yield browser
