from __future__ import annotations

import json

import msgspec
import pytest

from replayfleet.edge_client.doctor.findings import Finding, Report, Status, failure, ok, skipped, warning

FINE, LESS, BROKEN = ok("board", "a box"), warning("disk", "slow", "buy another"), failure("broker", "gone", "look")


@pytest.mark.parametrize(
    ("findings", "status", "code"),
    [
        ((), Status.OK, 0),
        ((skipped("keys", "none"),), Status.SKIPPED, 0),
        ((skipped("keys", "none"), FINE), Status.OK, 0),
        ((FINE, LESS), Status.WARNING, 0),
        ((BROKEN, FINE, LESS), Status.FAILURE, 1),
    ],
)
def test_only_a_failure_changes_the_exit_code(findings: tuple[Finding, ...], status: Status, code: int) -> None:
    report = Report(findings)
    assert (report.status, report.exit_code) == (status, code)


def test_json_has_every_key_of_every_finding_and_comes_back_as_it_was() -> None:
    report = Report((ok("board", "a box", memory_bytes=5, gpus=["x"]), BROKEN))
    values = json.loads(json.dumps(report.as_json()))
    assert values["format"] == 1
    assert values["status"] == "failure"
    assert values["checks"][0] == {
        "check": "board",
        "status": "ok",
        "found": "a box",
        "advice": "",
        "facts": {"memory_bytes": 5, "gpus": ["x"]},
    }
    assert msgspec.convert(values["checks"], tuple[Finding, ...]) == report.findings


def test_the_table_has_one_column_each_and_advice_below_what_was_found() -> None:
    report = Report((FINE, failure("provider.cuda", "it lacks " + "libcublasLt.so.13 " * 6, "install " + "it " * 30)))
    lines = report.lines(80)
    assert lines[0] == "board          ok       a box"
    assert lines[1].startswith("provider.cuda  failure  it lacks libcublasLt.so.13")
    assert all(len(line) <= 80 for line in lines)
    advice = next(number for number, line in enumerate(lines) if "-> install it" in line)
    assert lines[2].startswith(" " * 24 + "lib")
    assert lines[advice + 1].startswith(" " * 24 + "   it")
    assert lines[-1] == "failure: 1 failure, 1 ok"
