"""What a child says is checked, in its order, with the bytes that follow; how it ends is told in words."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from typing import Annotated, Any

import msgspec
import pytest

from replayfleet.federation.children import MAX_LINE_BYTES, Child, ChildEnded, ChildLost


class Picture(msgspec.Struct, tag="picture"):
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class Word(msgspec.Struct, tag="word"):
    text: str


def child(script: str) -> Child[Any]:
    prelude = "import os, sys, json, time\nout = sys.stdout.buffer\n"
    prelude += "def say(kind, **fields):\n  out.write(json.dumps(dict(type=kind, **fields)).encode() + b'\\n')\n"
    prelude += "def hear():\n  return json.loads(sys.stdin.readline())\n"
    size = lambda said: said.size if isinstance(said, Picture) else 0  # noqa: E731
    return Child((sys.executable, "-S", "-c", prelude + script), Picture | Word, num_bytes=size)


def test_lines_come_one_by_one_each_with_the_bytes_that_follow_it():
    made = child(
        "say('word', text='a'); say('word', text='b'); say('picture', size=0); say('picture', size=3 << 20)\n"
        "out.write(b'x' * (3 << 20)); out.flush(); hear(); say('word', text='c')"
    )
    try:
        heard = [made.receive(30.0) for _ in range(4)]
        assert heard[:3] == [(Word("a"), b""), (Word("b"), b""), (Picture(0), b"")]
        assert heard[3] == (Picture(3 << 20), b"x" * (3 << 20))
        made.send(None)
        assert made.receive(30.0) == (Word("c"), b"")
        with pytest.raises(ChildEnded, match="exit status 0"):
            made.receive()
    finally:
        assert made.close() == 0


def test_what_isnt_complete_in_time_is_waited_for_again():
    with contextlib.closing(
        child("say('picture', size=4); out.write(b'ab'); out.flush(); hear(); out.write(b'cd'); out.flush(); hear()")
    ) as made:
        began = time.monotonic()
        while made.receive(0.05) is None and not made._head:
            assert time.monotonic() - began < 30
        made.send(None)
        assert made.receive(30.0) == (Picture(4), b"abcd")
        assert made.receive(0) is None


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('Segmentation')", "an unreadable line"),
        ("say('picture', size=1 << 40)", "an unreadable line"),
        ("say('song')", "an unreadable line"),
        ('out.write(b\'{"type":"picture","size":1}\' + bytes([10]) + b\'xyz\'); out.flush()', "more than it announced"),
        (f"out.write(b'x' * {2 * MAX_LINE_BYTES}); out.flush()", "a line without an end"),
    ],
)
def test_what_it_never_should_say_is_a_reason(script: str, reason: str):
    with contextlib.closing(child(script)) as made, pytest.raises(ChildLost, match=reason):
        made.receive(30.0)


def test_of_what_was_announced_too_short_nothing_is_delivered():
    head = """b'{"type":"picture","size":1}'"""
    with contextlib.closing(
        child(f"out.write({head} + bytes([10]) + b'xyz'); out.flush(); hear(); say('word', text='a')")
    ) as made:
        with pytest.raises(ChildLost, match="more than it announced"):
            made.receive(30.0)
        assert made.receive(0) is None
        made.send(None)
        assert made.receive(30.0) == (Word("a"), b"")


def test_after_an_unreadable_line_it_is_listened_to_again():
    with contextlib.closing(child("print('a library says this', flush=True); say('word', text='a')")) as made:
        with pytest.raises(ChildLost):
            made.receive(30.0)
        assert made.receive(30.0) == (Word("a"), b"")


@pytest.mark.parametrize(
    ("script", "end"),
    [("sys.exit(3)", "exit status 3"), ("os.abort()", "SIGABRT"), ("os.close(1); time.sleep(60)", "closed its output")],
)
def test_how_it_ended_is_told_in_words(script: str, end: str):
    with contextlib.closing(child(script)) as made, pytest.raises(ChildEnded, match=end):
        made.receive(30.0, goodbye_s=0.5 if "close" in script else 30.0)


def test_one_that_is_told_to_end_may_say_goodbye_and_one_that_does_not_is_killed():
    polite, deaf = child("sys.stdin.read(); sys.exit(5)"), child("time.sleep(60)")
    assert polite.close(30.0) == 5
    assert deaf.close(0.2) == -9
    assert deaf.close() == -9
    deaf.send("nobody reads this")


THREADS = """
from __future__ import annotations
import sys, threading
import msgspec
from replayfleet.federation.children import decoder_of

sys.setswitchinterval(1e-6)
for number in range(400):
    exec(f'''class Inner{number}(msgspec.Struct):
    words: dict[str, list[int]]
    names: tuple[str, ...] | None = None

class Outer{number}(msgspec.Struct):
    inner: Inner{number}
    more: dict[str, list[int]]''')
    kind, together = globals()[f"Outer{number}"], threading.Barrier(4)

    def read():
        together.wait()
        decoder_of(kind).decode(b'{"inner": {"words": {}}, "more": {}}')

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_meet_a_kind_of_message_at_once_end_no_process() -> None:
    """A device with several cameras, each of which a process of its own reads, could end as it started."""
    done = subprocess.run([sys.executable, "-c", THREADS], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
