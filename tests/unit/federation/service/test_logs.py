from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Iterator

import pytest

from replayfleet.federation.service import logs
from replayfleet.federation.service.logs import EventLogger, FewLines, TextFormatter, configure_logging, redact


@pytest.fixture(autouse=True)
def _restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_is_event_first_then_key_value():
    stream = io.StringIO()
    configure_logging(stream=stream)
    EventLogger("a").info("round opened", round=3, rate=0.5, note="two words", empty="")
    line = stream.getvalue().rstrip("\n")
    assert line.split(" ", 1)[1] == 'INFO round opened round=3 rate=0.5 note="two words" empty=""'


def test_versions_of_a_raised_epoch_are_written_as_people_read_them():
    stream = io.StringIO()
    configure_logging(stream=stream)
    EventLogger("a").info("model swapped", version=(1 << 32) + 4)
    assert stream.getvalue().rstrip("\n").endswith("model swapped version=1/4")
    EventLogger("a").info("client online", version=-1)
    assert stream.getvalue().rstrip("\n").endswith("client online version=-1")


def test_json_lines_carry_the_same_fields():
    stream = io.StringIO()
    configure_logging(as_json=True, stream=stream)
    EventLogger("a").warning("swap refused", version=4)
    entry = json.loads(stream.getvalue())
    assert (entry["event"], entry["version"], entry["level"]) == ("swap refused", 4, "WARNING")


def test_a_field_may_have_any_name_also_one_that_a_child_process_chose(caplog: pytest.LogCaptureFixture):
    EventLogger("tests").warning("said by a child", event="other", self="me", msg="text")
    (record,) = caplog.records
    assert record.getMessage() == "said by a child"
    assert record.fields == {"event": "other", "self": "me", "msg": "text"}  # type: ignore[attr-defined]


def test_debug_lines_stay_out_by_default():
    stream = io.StringIO()
    configure_logging(stream=stream)
    EventLogger("a").debug("noise")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_credentials_in_urls_are_redacted_also_inside_tracebacks(as_json: bool):
    stream = io.StringIO()
    configure_logging(as_json=as_json, stream=stream)
    try:
        raise RuntimeError("mqtts://cam:secret@host:8883 refused")
    except RuntimeError:
        EventLogger("a").exception("broker lost", url="rtsp://me:secret@camera/1")
    assert "secret" not in stream.getvalue()
    assert "***@camera/1" in stream.getvalue()


def test_urls_without_credentials_stay_as_they_are():
    assert redact("mqtt://host:1883/a@b") == "mqtt://host:1883/a@b"


HOSTILE = "cam\x1b[2J\x07\x9b31m\u202eevil\x7f\ninjected round committed"


@pytest.mark.parametrize("as_json", [False, True])
def test_characters_that_a_terminal_obeys_are_written_out_wherever_they_come_from(as_json: bool):
    stream = io.StringIO()
    configure_logging(as_json=as_json, stream=stream)
    EventLogger("a").info("client online", client=HOSTILE, **{HOSTILE: 1})
    logging.getLogger("b").warning("dropped %s", HOSTILE)
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError:
        EventLogger("a").exception(HOSTILE)
    lines = stream.getvalue().splitlines()
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("injected") for line in lines)
    if as_json:
        assert json.loads(lines[0])["client"] == HOSTILE


class Flood:
    """A log whose clock is a number."""

    def __init__(self) -> None:
        self.stream, self.now = io.StringIO(), 0.0
        handler = FewLines(self.stream, lambda: self.now)
        handler.setFormatter(TextFormatter())
        logging.basicConfig(level="INFO", handlers=[handler], force=True)
        self.log = EventLogger("flood")

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def test_a_flood_of_one_event_becomes_a_few_lines_and_a_number():
    flood = Flood()
    for _ in range(10_000):
        flood.now += 0.001
        flood.log.warning("upload rejected", client="cam-1")
    assert len(flood.lines) <= 10
    flood.log.warning("upload rejected", client="cam-2")
    assert flood.lines[-1].endswith("upload rejected client=cam-2")
    flood.now += 60
    flood.log.info("round opened")
    written = sum("upload rejected client=cam-1" in line for line in flood.lines)
    counts = [int(line.rpartition("=")[2]) for line in flood.lines if "more of these" in line]
    assert written + sum(counts) == 10_000
    assert flood.lines[-1].endswith("round opened")


def test_records_of_others_are_counted_by_their_text_without_its_values():
    flood = Flood()
    for number in range(1000):
        logging.getLogger("paho").warning("message dropped topic=%s bytes=%d", number, 9)
        logging.getLogger("store").warning("bundle not %s transfer=%s", "put", number)
    assert len(flood.lines) <= 20
    flood.now += 60
    flood.log.info("round opened")
    assert any('more of these of="message dropped" count=' in line for line in flood.lines)
    assert any('more of these of="bundle not ..." count=' in line for line in flood.lines)


def test_the_story_of_quick_rounds_is_told_whole():
    flood = Flood()
    for number in range(300):
        flood.now += 0.25
        flood.log.info("round committed", round=number)
    assert len(flood.lines) == 300


def test_where_nobody_set_logging_up_the_whole_line_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr("logging.lastResort", logging.StreamHandler(sys.stderr))
    EventLogger("nobody").warning("images left out", num=1, reason="damaged: 9 bytes")
    assert capsys.readouterr().err == 'images left out num=1 reason="damaged: 9 bytes"\n'


@pytest.mark.timeout(60)
def test_a_log_that_nobody_reads_keeps_no_service_from_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line waited in a full pipe for good, and with it whoever said it: cameras, rounds, the end at SIGTERM."""
    monkeypatch.setattr(logs, "PATIENCE_S", 0.01)
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, bytes(4096))
    os.set_blocking(writes, True)
    with os.fdopen(writes, "w") as stream:
        configure_logging(stream=stream)
        log = EventLogger("board")
        log.info("round opened", round=3)
        log.info("round closed", round=3)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.read(reads, 65536)
        log.info("round opened", round=4)
        lines = os.read(reads, 65536).decode().splitlines()
    os.close(reads)
    assert [line.partition(" ")[2] for line in lines] == [
        "WARNING log not read lines_lost=2",
        "INFO round opened round=4",
    ]
