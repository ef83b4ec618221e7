"""Checks run in real child processes; here they hang and crash on purpose."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import time

import psutil
import pytest

from replayfleet.edge_client.doctor.findings import Finding, Status, ok
from replayfleet.edge_client.doctor.running import Check, run_check

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # fork, beside a test runner


def test_findings_come_back_as_they_were_however_many() -> None:
    many = [ok(f"check.{number}", "x" * 2000, number=number) for number in range(100)]
    assert run_check(Check("many", lambda: many)) == many


def test_what_a_check_prints_or_reads_does_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    def noisy() -> list[Finding]:
        sys.stdout.write("noise\n")
        os.write(1, b"native noise\n")
        os.write(2, b"native errors\n")
        return [ok("noisy", "silent", read=os.read(0, 10).decode())]

    assert run_check(Check("noisy", noisy)) == [ok("noisy", "silent", read="")]
    assert capfd.readouterr() == ("", "")


def test_a_check_that_hangs_is_killed_in_time() -> None:
    began = time.monotonic()
    (found,) = run_check(Check("slow", lambda: [ok("slow", str(time.sleep(60)))], timeout_s=0.3))
    assert time.monotonic() - began < 45
    assert (found.check, found.status) == ("slow", Status.FAILURE)
    assert "no answer in 0 s" in found.found


def test_a_native_crash_and_an_exception_are_findings_and_the_next_check_runs() -> None:
    before = set(psutil.Process().children())  # the test runner's

    def crash() -> list[Finding]:
        faulthandler.disable()  # the test runner's
        ctypes.string_at(0)
        return []

    def fail() -> list[Finding]:
        raise KeyError("rtsp://user:secret@camera/street")

    (crashed,), (failed,) = run_check(Check("driver", crash)), run_check(Check("bug", fail))
    assert "ended by SIGSEGV" in crashed.found
    assert "KeyError" in failed.found
    assert "secret" not in failed.found
    assert {crashed.status, failed.status} == {Status.FAILURE}
    assert run_check(Check("next", lambda: [ok("next", "fine")])) == [ok("next", "fine")]
    assert set(psutil.Process().children()) <= before, "a check was left behind"
