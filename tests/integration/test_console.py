"""The console as a process, beside an aggregator and in a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayfleet.aggregator.console import app
from replayfleet.aggregator.console.beside import ConsoleBeside
from replayfleet.aggregator.console.watch import Watch
from replayfleet.aggregator.operator.thumbnails import FOLDER, KEPT_S
from replayfleet.aggregator.store import AggregatorStore, StoredArtefacts
from replayfleet.federation.children import child_command
from replayfleet.federation.service.web.access import Access, add_token
from replayfleet.federation.service.web.guard import Rules
from replayfleet.federation.service.web.serving import WebServer
from replayfleet.federation.wire.protocol.thumbnails import JPEG, Thumbnail, encode_thumbnail
from tests.support import watched_fleet as watched
from tests.support.browser import AXE, Browser
from tests.support.consoles import console
from tests.support.processes import is_gone
from tests.support.waiting import until
from tests.support.watched_fleet import BEGAN, watched_fleet

PAGES = ("/", "/round", "/clients/cam-002", "/methods", "/journal")
PATIENCE_S = 60.0


def test_a_console_ends_with_one_line_where_no_aggregator_has_run(tmp_path: Path) -> None:
    ended = subprocess.run(
        child_command("replayfleet.aggregator.console.command", "--data-dir", str(tmp_path)),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "no aggregator has run here" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_it_is_started_again_when_it_dies_and_ends_with_its_parent(tmp_path: Path) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ConsoleBeside(("--data-dir", str(folder), "--listen", f"127.0.0.1:{port}"), again_s=0.1) as beside:
        answered(port)
        process = beside._process
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
        answered(port)
        process = beside._process
        assert process is not None
    assert process.poll() is not None


def test_it_ends_with_a_parent_that_is_killed_while_it_begins(tmp_path: Path) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    code = (
        "import os, time\n"
        "from replayfleet.aggregator.console.beside import ConsoleBeside\n"
        f"beside = ConsoleBeside(('--data-dir', {str(folder)!r}, '--listen', '127.0.0.1:0')).__enter__()\n"
        "while beside._process is None:\n"
        "    time.sleep(0.001)\n"
        "print(beside._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    assert parent.returncode == -signal.SIGKILL
    console_pid = int(parent.stdout)
    try:
        until(lambda: is_gone(console_pid), PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(console_pid, signal.SIGKILL)


def test_one_that_stands_still_ends_with_a_parent_that_is_killed() -> None:
    console = "import os, signal, time; signal.signal(15, print); print(os.getpid(), flush=True); time.sleep(600)"
    code = (
        "import sys, time\n"
        "from replayfleet.aggregator.console.beside import ConsoleBeside\n"
        "beside = ConsoleBeside(())\n"
        f"beside._command = (sys.executable, '-c', {console!r})\n"
        "with beside:\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        console_pid = int(parent.stdout.readline())
        os.kill(console_pid, signal.SIGSTOP)
        parent.kill()
    try:
        until(lambda: is_gone(console_pid), PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(console_pid, signal.SIGKILL)


def answered(port: int) -> None:
    """Wait until a console answers there."""
    until(lambda: answers(port), PATIENCE_S)


def answers(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as line:
        try:
            line.request("GET", "/")
            return line.getresponse().status == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with console(watched_fleet(tmp_path_factory.mktemp("fleet") / "aggregator")) as found:
        yield found


@pytest.mark.parametrize("path", PAGES)
def test_no_page_is_wider_than_its_window_nor_breaks_its_own_policy(browser: Browser, address: str, path: str) -> None:
    for width in (1280, 390):
        page = browser.page(address + path, width=width)
        page.wait("document.getElementById('live-state').textContent === 'live'")
        assert page.run("document.documentElement.scrollWidth") == width
        assert page.run("document.title").endswith("street")
        assert page.complaints() == []
        page.close()


@pytest.mark.parametrize("width", [1280, 320])
def test_the_longest_names_make_no_page_wider_than_its_window(
    browser: Browser, tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "n" * 63
    monkeypatch.setattr(watched, "names", lambda num: [f"{long}{number}" for number in range(num)])
    folder = watched_fleet(tmp_path / "fleet", rejects=f"{long}2")
    with (folder / "events.jsonl").open("a") as file:
        metrics = {f"stream_accuracy/{'place' * 40}": 0.5}
        told = {"time": 1800000500, "event": "client report", "client": f"{long}0", "round": 3, "metrics": metrics}
        file.write(json.dumps(told) + "\n")
    with console(folder) as url:
        for path in ("/", "/round", f"/clients/{long}0", "/methods", "/journal"):
            page = browser.page(url + path, width=width)
            assert page.run("document.documentElement.scrollWidth") == width, path
            assert page.run("(nav => nav.scrollWidth <= nav.clientWidth)(document.querySelector('nav'))"), path
            page.close()


def test_an_open_page_follows_the_fleet(browser: Browser, tmp_path: Path) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    with console(folder) as url:
        page = browser.page(url + "/clients/cam-001")
        page.wait("document.getElementById('live-state').textContent === 'live'")
        with (folder / "events.jsonl").open("a") as file:
            file.write(
                '{"time": 1800000500, "event": "model rolled back", "client": "cam-001", "reason": "too-slow"}\n'
            )
        page.wait("document.body.innerText.includes('too-slow')")
        page.close()


def test_the_title_of_an_open_page_follows_the_fleet_too(browser: Browser, tmp_path: Path) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    with console(folder) as url:
        page = browser.page(url + "/round")
        page.wait("document.title === 'Round 3 · street'")
        notices = "document.querySelector('#notices[role=status]')"
        assert page.run(f"(window.before = {notices}).innerText").startswith("The aggregator isn't running")
        store = AggregatorStore(folder)
        store.set_num_rounds(4)
        store.close_round(3, BEGAN)
        store.commit_round(3, StoredArtefacts((), "cd" * 32), {}, BEGAN)
        store.close()
        page.wait("document.title === 'Round 4 · street'")
        page.wait(f"{notices}.innerText === ''")  # the run is over
        assert page.run(f"{notices} === window.before"), "a screen reader tells what comes into it"
        page.close()


def test_who_goes_through_an_open_page_with_keys_stays_where_they_are(browser: Browser, tmp_path: Path) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    with console(folder) as url, (folder / "events.jsonl").open("a", buffering=1) as file:
        page = browser.page(url + "/journal")
        page.wait("document.getElementById('live-state').textContent === 'live'")
        page.run("[...document.querySelectorAll('#events a[href=\"/clients/cam-001\"]')].at(-2).focus()")
        row = "document.activeElement.closest('li')?.innerText"
        before = page.run(row)
        file.write('{"time": 1800000500, "event": "client gone", "client": "cam-001", "reason": "asleep"}\n')
        page.wait("document.body.innerText.includes('asleep')")
        assert page.run(row) == before

        page.look(width=320)
        page.open(url + "/methods")
        page.wait("document.getElementById('live-state').textContent === 'live'")
        page.run("(box => { box.focus(); box.scrollTo(60, 0) })(document.querySelector('#weights .scroll'))")
        weights = {name: dict.fromkeys(watched.names(4), 0.25) for name in watched.names(4)}
        file.write(json.dumps({"time": 1800000501, "event": "round committed", "round": 3, "weights": weights}) + "\n")
        page.wait("document.getElementById('weights').innerText.includes('Round 3')")
        assert page.run("[document.activeElement.className, document.activeElement.scrollLeft]") == ["scroll", 60]
        page.close()


def test_an_open_page_knows_who_has_logged_in_in_another_tab(browser: Browser, tmp_path: Path) -> None:
    folder, file = watched_fleet(tmp_path / "fleet"), tmp_path / "tokens.toml"
    tokens = {name: add_token(file, name, "viewer") for name in ("anna", "ben")}
    with console(folder, "--tokens", str(file)) as url:
        pages = []
        for name, token in tokens.items():
            pages.append(browser.page(url + "/login"))
            pages[-1].write(token)
            pages[-1].press("Enter")
            pages[-1].wait(f"document.querySelector('form.who').innerText.startsWith('{name}, viewer')")
        pages[0].call("Page.bringToFront")
        pages[0].wait("document.querySelector('form.who').innerText.startsWith('ben, viewer')")
        pages[0].click("form.who button")
        pages[0].wait("document.querySelector('p.who') !== null")
        for page in pages:
            page.close()


def test_an_open_page_gets_its_first_chart_where_it_would_stand(browser: Browser, tmp_path: Path) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    journal = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in journal if "client report" not in line))
    with console(folder) as url:
        page = browser.page(url + "/clients/cam-001")
        page.wait("document.getElementById('live-state').textContent === 'live'")
        assert page.run("document.querySelectorAll('.chart').length") == 0
        with (folder / "events.jsonl").open("a") as file:
            file.writelines(f"{line}\n" for line in journal if "client report" in line)
        page.wait("document.querySelectorAll('.chart svg').length > 0")
        parts = "[...document.querySelectorAll('#main > [data-live]')].map(one => one.id)"
        assert page.run(parts) == ["notices", "head", "chart-accuracy", "chart-places", "events"]
        page.close()


def test_a_clients_page_shows_its_cameras_newest_pictures_though_nothing_else_changes(
    browser: Browser, tmp_path: Path
) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    picture = folder / FOLDER / "cam-001" / "0123abcd"
    with console(folder) as url:
        page = browser.page(url + "/clients/cam-001")
        page.wait("document.getElementById('live-state').textContent === 'live'")
        picture.parent.mkdir(parents=True)
        picture.write_bytes(encode_thumbnail(Thumbnail("front", 1, JPEG + b"x")))
        page.wait("document.querySelector('#cameras img') !== null")
        first = page.run("document.querySelector('#cameras img').src")
        os.utime(picture, (0, time.time() + 30))
        page.wait(f"document.querySelector('#cameras img').src !== '{first}'")
        os.utime(picture, (0, time.time() - KEPT_S - 1))
        page.wait("document.querySelector('#cameras') === null")
        page.close()


def test_a_page_that_is_told_of_no_changes_asks_for_them_and_says_when_it_may_not_look_any_more(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_LIVE", 0)
    folder, access = watched_fleet(tmp_path / "fleet"), Access(None, reading_needs_token=False)
    served = app.Console(Watch(folder), Rules(frozenset({"127.0.0.1"}), access)).app
    server = WebServer(served, "127.0.0.1", 0, name="console")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.url, PATIENCE_S)
        page = browser.page(server.url + "clients/cam-001")
        page.wait("document.getElementById('live-state').textContent === 'live'")
        with (folder / "events.jsonl").open("a") as file:
            file.write('{"time": 1800000500, "event": "client gone", "client": "cam-001", "reason": "asleep"}\n')
        page.wait("document.body.innerText.includes('asleep')")
        access.reading_needs_token = True
        page.wait("document.getElementById('stale').innerText.startsWith('You are logged out')")
        page.close()
    finally:
        server.stop()
        thread.join(PATIENCE_S)


def test_a_page_whose_console_is_gone_says_so_where_it_is_looked_at(browser: Browser, tmp_path: Path) -> None:
    folder = watched_fleet(tmp_path / "fleet")
    with console(folder) as url:
        page = browser.page(url + "/")
        page.wait("document.getElementById('live-state').textContent === 'live'")
        assert page.run("document.getElementById('stale').hidden")
    page.wait("!document.getElementById('stale').hidden")
    assert "shows what was known last" in page.run("document.getElementById('stale').innerText")
    assert page.run("document.getElementById('stale').getBoundingClientRect().bottom < innerHeight")
    page.close()


def test_all_of_it_can_be_reached_with_the_keyboard(browser: Browser, address: str) -> None:
    page = browser.page(address + "/")
    seen = []
    for _ in range(7):
        page.press("Tab")
        seen.append(page.run("document.activeElement.innerText"))
    assert seen[:2] == ["To the content", "street"]
    assert seen[2:6] == ["Fleet", "Round", "Method", "Journal"]
    assert seen[6] == "cam-002"  # what needs somebody stands first
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Enter")
    page.wait("location.pathname === '/clients/cam-002'")
    page.close()


def test_enlarged_nothing_that_has_the_focus_lies_below_the_bar(browser: Browser, address: str) -> None:
    page = browser.page(address + "/journal", width=640, height=450)
    page.run("[...document.querySelectorAll('#events a')].at(-1).focus()")
    at = "(r => [r.x + 5, r.y + r.height / 2])(document.activeElement.getBoundingClientRect())"
    for _ in range(30):
        page.press("Tab", shift=True)
        seen = page.run(f"document.elementFromPoint(...{at}) === document.activeElement")
        assert seen, page.run("document.activeElement.outerHTML")
    page.close()


@pytest.mark.skipif(not AXE.exists(), reason="axe isn't there: make test-console fetches it with npm")
@pytest.mark.parametrize("path", [*PAGES, "/login", "/nowhere"])
def test_an_accessibility_checker_finds_no_fault(browser: Browser, address: str, path: str) -> None:
    for width in (1280, 390):
        for dark in (False, True):
            page = browser.page(address + path, width=width, dark=dark)
            assert page.faults() == [], (width, dark)
            page.close()


@pytest.mark.skipif(not AXE.exists(), reason="axe isn't there: make test-console fetches it with npm")
@pytest.mark.parametrize("dark", [False, True])
def test_every_share_in_a_matrix_of_weights_can_be_read(browser: Browser, address: str, dark: bool) -> None:
    page = browser.page(address + "/methods", dark=dark)
    page.wait("document.getElementById('live-state').textContent === 'live'")
    page.run("document.querySelectorAll('.heat tbody td').forEach((one, place) => { one.className = `s${place + 5}` })")
    assert page.run("document.querySelectorAll('.s20').length") == 1
    assert page.faults() == []
    page.close()


def test_what_a_field_is_for_can_be_read_on_a_dark_page(browser: Browser, address: str) -> None:
    page = browser.page(address + "/journal", dark=True)
    looks = "getComputedStyle(field, '::placeholder').color, getComputedStyle(field).backgroundColor"
    found = page.run(f"(field => [{looks}])(document.querySelector('[name=q]'))")
    light, dark = (luminance(colour) for colour in found)
    assert (light + 0.05) / (dark + 0.05) >= 4.5, found
    page.close()


def luminance(colour: str) -> float:
    """Return that of ``rgb(154, 162, 175)``, as WCAG defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(
    ("path", "told"),
    [("/methods", ".heat tbody td"), ("/round", ".progress i"), ("/round", "nav a"), ("/round", ".steps li")],
)
def test_in_colours_of_the_readers_own_nothing_is_missing_that_a_surface_or_a_line_tells(
    browser: Browser, address: str, path: str, told: str
) -> None:
    page = browser.page(address + path)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "forced-colors", "value": "active"}])
    looks = "one => (s => `${s.backgroundColor} ${s.borderBottomColor} ${s.borderTopWidth}`)(getComputedStyle(one))"
    assert page.run(f"new Set([...document.querySelectorAll('{told}')].map({looks})).size") > 1
    page.close()
