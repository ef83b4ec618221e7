"""Logs as lines of ``event key=value``, or of JSON; credentials in URLs never reach them.

Some of what is logged others can bring about, and some of its words are theirs: a flood of one event becomes a few
lines, and characters that a terminal would obey are written out.
"""

from __future__ import annotations

import json
import logging
import re
import select
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TextIO, cast

from replayfleet.federation.service.quotas import Limiter
from replayfleet.federation.service.words import visible
from replayfleet.federation.wire.protocol.messages import spoken

_CREDENTIALS = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@]*@")
PATIENCE_S = 1.0
"""So long a line waits for whoever reads the log; those after it don't until it is read again."""
_TALKATIVE = ("amqtt", "onnx_ir", "onnxscript", "torch", "transitions")
_STORY = (5.0, 100.0)  # lines a second and at once, of one event about one client
_TROUBLE = (0.2, 5.0)
_VALUES, _PLACE = re.compile(r" \w+=%"), re.compile(r"%[-.\d]*[a-z]")
_NEEDS_QUOTES = re.compile(r"[\s\"=]|^$")


def redact(text: str) -> str:
    """Return ``text`` with the user and password of every URL replaced by ``***``."""
    return _CREDENTIALS.sub(r"\g<scheme>***@", text)


class EventLogger:
    """A logger whose calls are an event and its fields: ``log.info("round opened", round=3)``."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: object) -> None:
        """Log what only a developer wants to see."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Log a step of the story of rounds and swaps."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Log what an operator should look at; the process goes on by itself."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Log a failure that needs an operator."""
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, /, error: BaseException | None = None, **fields: object) -> None:
        """Log a failure with the traceback of ``error``; without one, of the exception being handled."""
        self._log(logging.ERROR, event, fields, exc_info=error or True)

    def _log(
        self, level: int, event: str, fields: dict[str, object], *, exc_info: bool | BaseException = False
    ) -> None:
        if not self._logger.hasHandlers():  # where nobody set logging up, Python prints the event alone
            event, fields = redact(visible(" ".join((event, *_words(fields))))), {}
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, exc_info=exc_info, extra={"fields": fields})


class TextFormatter(logging.Formatter):
    """``2026-11-02T10:00:00Z INFO round opened round=3 clients=5``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, or more where a traceback belongs to it."""
        words = [_timestamp(record), record.levelname, record.getMessage()]
        fields = _fields(record)
        if isinstance(version := fields.get("version"), int) and version >= 0:
            fields = {**fields, "version": spoken(version)}
        words += _words(fields)
        lines = [" ".join(words)]
        if record.exc_info:
            lines += [f"  {line}" for line in self.formatException(record.exc_info).split("\n")]
        return redact("\n".join(map(visible, lines)))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time``, ``level``, ``event``, ``logger`` and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        entry: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname,
            "event": record.getMessage(),
            "logger": record.name,
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return redact(json.dumps(entry, default=str).replace("\x7f", "\\u007f"))


if TYPE_CHECKING:
    _ToStream = logging.StreamHandler[TextIO]
else:  # Python 3.10, a Jetson's, takes nothing in brackets here
    _ToStream = logging.StreamHandler


class FewLines(_ToStream):
    """Writes a flood of one event about one client as a few lines, and then says how many there were.

    Args:
        stream: where to.
        clock: seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._num_lost = 0
        self._story, self._trouble = Limiter(*_STORY), Limiter(*_TROUBLE)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless there were many like it; first those numbers that are due."""
        now = self._clock()
        for limiter, level in ((self._story, logging.INFO), (self._trouble, logging.WARNING)):
            for key, count in limiter.left_out(now):
                self._write(_more(record, level, key, count))
        limiter = self._story if record.levelno <= logging.INFO else self._trouble
        if record.levelno <= logging.DEBUG or limiter.admit(_kind(record), now):
            self._write(record)

    def _write(self, record: logging.LogRecord) -> None:
        if not is_taken(self.stream, 0.0 if self._num_lost else PATIENCE_S):
            self._num_lost += 1
            return
        if self._num_lost:
            told = logging.LogRecord(record.name, logging.WARNING, "", 0, "log not read", None, None)
            told.fields = {"lines_lost": self._num_lost}
            self._num_lost = 0
            super().emit(told)
        super().emit(record)


def is_taken(stream: TextIO | None, wait_s: float) -> bool:
    """Whether a line can be written within some seconds: a full pipe, or a terminal at Ctrl-S, takes none."""
    look = select.poll()
    try:
        look.register(cast("TextIO", stream).fileno(), select.POLLOUT)
    except (OSError, ValueError, AttributeError):  # none, or one in memory
        return True
    return bool(look.poll(1000 * wait_s))


def configure_logging(*, as_json: bool = False, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send all logs of this process to ``stream`` (standard error), replacing earlier handlers."""
    handler = FewLines(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)


def writes_json() -> bool:
    """Whether this process logs JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _kind(record: logging.LogRecord) -> tuple[str, str]:
    """Event and client; of records of others, the text before its values are put in."""
    return (str(record.msg), str(_fields(record).get("client", "")))


def _more(record: logging.LogRecord, level: int, key: Any, count: int) -> logging.LogRecord:
    event, client = key
    told = logging.LogRecord(record.name, level, "", 0, "more of these", None, None)
    of = _PLACE.sub("...", _VALUES.split(event)[0])
    told.fields = {"of": of, **({"client": client} if client else {}), "count": count}
    return told


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, tz=timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _words(fields: dict[str, object]) -> list[str]:
    return [f"{key}={_plain(value)}" for key, value in fields.items()]


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text) if _NEEDS_QUOTES.search(text) else text
