from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from support.tiny_fleet import TinyClient, TinyFleet

from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.federation.errors import Reason
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.wire.protocol.messages import Manifest


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)


def sets(**parameters: torch.Tensor) -> Artefacts:
    return Artefacts({"task": parameters}, {"count": 1})


def replaced(**fields: object) -> Callable[[Artefacts, Manifest], tuple[Artefacts, Manifest]]:
    return lambda artefacts, manifest: (artefacts, msgspec.structs.replace(manifest, **fields))


def artefacts(made: Artefacts) -> Callable[[Artefacts, Manifest], tuple[Artefacts, Manifest]]:
    return lambda _, manifest: (made, manifest)


GOOD = {"w": torch.zeros(4)}
BAD = {
    "stale": (replaced(round=7), Reason.WRONG_ROUND, "upload is for round 7, open round is 0"),
    "NaN": (artefacts(sets(w=torch.full((4,), float("nan")))), Reason.NOT_FINITE, "tensor 'w' has values that are NaN"),
    "shape": (
        artefacts(sets(w=torch.zeros(5))),
        Reason.WRONG_LAYOUT,
        "tensor 'w' is (5,) torch.float32, expected (4,)",
    ),
    "dtype": (
        artefacts(sets(w=torch.zeros(4, dtype=torch.float64))),
        Reason.WRONG_LAYOUT,
        "'w' is (4,) torch.float64, expected (4,) torch.float32",
    ),
    "missing": (artefacts(sets(v=torch.zeros(4))), Reason.WRONG_LAYOUT, "tensor 'w' is missing, and 1 more differ"),
    "unknown set": (
        artefacts(Artefacts({"task": GOOD, "sub-generator/9": {"g": torch.zeros(3)}}, {"count": 1})),
        Reason.WRONG_LAYOUT,
        "parameter set 'sub-generator/9' is not known",
    ),
    "no task": (
        artefacts(Artefacts({"sub-generator/0": {"g": torch.zeros(3)}}, {"count": 1})),
        Reason.MALFORMED,
        "parameter set 'task' is missing",
    ),
    "count": (artefacts(Artefacts({"task": GOOD}, {"count": 5})), Reason.WRONG_COUNTS, "count is 5, expected 1"),
    "no facts": (artefacts(Artefacts({"task": GOOD}, {})), Reason.MALFORMED, "not an upload of method 'tiny'"),
    "huge": (
        artefacts(sets(w=torch.zeros(1 << 16))),
        Reason.TOO_LARGE,
        "blob 'task' has 262216 bytes, expected at most 65552",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_a_bad_upload_is_rejected_with_its_reason_and_the_round_goes_on(tmp_path: Path, case: str):
    broken, reason, detail = BAD[case]
    with contextlib.closing(TinyFleet(tmp_path, num_rounds=1, deadline_s=20)) as fleet:
        bad = fleet.clients["cam-2"]
        bad.broken = broken
        fleet.run(until=lambda: fleet.rounds.index == 1)
        refused = [verdict for verdict in bad.verdicts if not verdict.accepted]
        assert [verdict.reason for verdict in refused] == [reason.value]
        assert detail in refused[0].detail
        assert "the round goes on with" in refused[0].detail
        noted = [e for e in read_journal(tmp_path / "aggregator") if e["event"] == "upload rejected"]
        assert [(e["client"], e["reason"]) for e in noted] == [("cam-2", reason.value)]
        closed = [e for e in read_journal(tmp_path / "aggregator") if e["event"] == "round closed"]
        assert (closed[0]["by"], closed[0]["uploads"]) == ("deadline", 2)
        assert set(fleet.store.uploads(0)) == {"cam-1", "cam-3"}


def test_a_rejected_upload_leaves_no_blob_behind(tmp_path: Path):
    with contextlib.closing(TinyFleet(tmp_path, num_rounds=1, deadline_s=20)) as fleet:
        fleet.clients["cam-2"].broken = artefacts(sets(w=torch.full((4,), float("inf"))))
        fleet.run(until=lambda: fleet.rounds.index == 1)
        fleet.run()
        blobs = {path.name for path in (tmp_path / "aggregator" / "blobs").glob("??/*")}
        assert blobs == fleet.store.referenced()


def test_a_second_different_upload_of_a_client_does_not_replace_the_first(tmp_path: Path):
    with contextlib.closing(TinyFleet(tmp_path, num_rounds=1)) as fleet:
        fleet.clients["cam-2"].dies_in = 0
        eager = fleet.clients["cam-1"]
        fleet.run(until=lambda: "cam-1" in fleet.rounds.accepted)
        first = fleet.store.uploads(0)["cam-1"]
        eager.broken = replaced(version=9)
        eager.send(sets(w=torch.ones(4)), 0, fleet.now)
        fleet.run(until=lambda: any(verdict.version == 9 for verdict in eager.verdicts))
        assert eager.verdicts[-1].reason == Reason.STALE_VERSION.value
        assert fleet.store.uploads(0)["cam-1"] == first


def test_a_second_device_with_a_members_name_is_told_to_operators_and_gets_nothing(tmp_path: Path):
    with contextlib.closing(TinyFleet(tmp_path, num_rounds=2)) as fleet:
        fleet.run(until=lambda: fleet.rounds.index == 1)
        beside = SimpleNamespace(session=lambda _, **words: fleet.broker.session("another-id", **words))
        thief = fleet.clients["thief"] = TinyClient(beside, "cam-1", tmp_path / "another-disk")
        fleet.run()
        noted = [e for e in read_journal(tmp_path / "aggregator") if e["event"] == "other device"]
        assert {e["client"] for e in noted} == {"cam-1"}
        assert not thief.verdicts
