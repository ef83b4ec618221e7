from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from replayfleet.federation.service.logs import EventLogger, configure_logging, redact


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
