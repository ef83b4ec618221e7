from __future__ import annotations

import json
import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from replayfleet.edge_client.cli import cli
from replayfleet.edge_client.doctor.broker import look_at_session
from replayfleet.edge_client.operator import status as status_module
from replayfleet.edge_client.operator.status import lines, read_status, stale
from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.service.data_dir import claim_data_dir


def written(folder: Path, *, age_s: float, pid: int | None = None) -> None:
    path = folder / "status.json"
    path.write_text(json.dumps({"healthy": True, "pid": pid or os.getpid(), "broker": "connected"}))
    os.utime(path, (time.time() - age_s,) * 2)


def test_an_old_status_of_a_client_that_runs_is_told_by_words_and_exit_code(tmp_path: Path) -> None:
    with claim_data_dir(tmp_path, fleet="f", role="client"):
        written(tmp_path, age_s=7200.0)
        done = CliRunner().invoke(cli, ["status", "--data-dir", str(tmp_path), "--json"])
        found = [found.status for found in look_at_session(tmp_path)]
    said = json.loads(done.stdout)
    assert (said["running"], said["healthy"]) == (True, False)
    assert done.exit_code == 1
    assert isinstance(done.exception, ReplayfleetError)
    assert "a client runs, and status.json is 720" in str(done.exception)
    assert found == ["failure"], "the doctor doesn't trust it either"


@pytest.mark.parametrize(("lives", "age_s"), [(True, -3600.0), (False, 7200.0)])
def test_a_fresh_status_and_one_of_a_client_that_ended_are_as_they_were_written(
    tmp_path: Path, lives: bool, age_s: float
) -> None:
    with claim_data_dir(tmp_path, fleet="f", role="client") as claimed:
        written(tmp_path, age_s=age_s)  # its number may be another process's by now: here it is
        if not lives:
            claimed.close()
        status = read_status(tmp_path)
    assert (status["running"], status["healthy"], stale(status)) == (lives, True, "")


@pytest.mark.parametrize("lives", [True, False])
def test_who_may_not_read_the_lock_goes_by_the_process(
    tmp_path: Path, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, pid=os.getpid() if lives else 2**22 + 1, age_s=0.0)  # above the largest of Linux
    monkeypatch.setattr(status_module, "in_use", Mock(side_effect=PermissionError))
    assert read_status(tmp_path)["running"] is lives


def test_a_status_of_another_format_is_not_shown(tmp_path: Path) -> None:
    written(tmp_path, age_s=0.0)
    assert read_status(tmp_path)["healthy"], "of a client that a program started by itself"
    (tmp_path / "fleet.json").write_text('{"format": 2, "fleet": "f", "role": "client", "owner": "cam-1"}')
    with pytest.raises(SettingsError, match="format 2, this process is of format 1; use the version"):
        read_status(tmp_path)


def test_what_is_not_known_is_empty_and_what_has_parts_is_one_line() -> None:
    status = {"probation_version": None, "frames": 0, "prediction": {"camera": "front", "class": 3}}
    assert lines(status) == [
        "probation_version",
        "frames             0",
        'prediction         {"camera": "front", "class": 3}',
    ]


def test_people_read_versions_as_the_aggregator_writes_them() -> None:
    status = {"serving_version": 2**32 + 4, "probation_version": -1}
    assert lines(status) == ["serving_version    1/4", "probation_version  -1"]
