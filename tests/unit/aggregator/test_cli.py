from __future__ import annotations

import dataclasses
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.tiny_fleet import tiny_spec

from replayfleet.aggregator.cli import main
from replayfleet.aggregator.operator.status import ClientStatus, read_status
from replayfleet.aggregator.store import AggregatorStore, StoredArtefacts
from replayfleet.federation.service.data_dir import claim_data_dir


def answered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["aggregator", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--clients", "2"], "data_dir is missing: expected --data-dir, 'data_dir' in"),
        (["--data-dir", "{dir}", "--clients", "0"], "clients"),
        (["--method", "pfedgpr"], "unknown method 'pfedgpr'; did you mean 'pfedgrp'?"),
        (["--dataset", "fashion"], "unknown data set 'fashion'; did you mean 'fashion-mnist'?"),
        (["--settings", "papr"], "unknown settings 'papr'; did you mean 'paper'?"),
        (["--set", "gate_treshold=1"], "has no setting 'gate_treshold'; did you mean 'gate_threshold'?"),
        (["--set", "gate"], "--set gate: expected KEY=VALUE"),
        (["--min-clients", "3"], "min_clients is 3, expected 1 to clients (2)"),
        (["--rounds", "0"], "--rounds is '0', expected a whole number, 1 to 10000000"),
        (["--deadline-s", "nan"], "--deadline-s is 'nan', expected a number, more than 0"),
        (["--fleet", "a/b"], "fleet 'a/b' is not 1 to 64 letters, digits, '_' or '-'"),
        (["--fleet", "-yard"], "fleet '-yard' is not 1 to 64 letters, digits, '_' or '-' (not as the first)"),
        (["--threads", "0"], "--threads is '0', expected a whole number, 1 to 1024"),
        (["--open-rounds", "noon"], "--open-rounds is 'noon', expected by-hand"),
        (["--broker", "mqtt://example.org"], "is on another machine and not encrypted"),
        (["--broker", "mqtts://user:secret@example.org"], "credentials don't belong into a URL"),
        (["--tls-ca", "none.pem"], "TLS file 'none.pem' does not exist"),
        (["--task", "none.toml"], "none.toml: can't be read"),
        (["--config", "none.toml"], "none.toml: can't be read"),
        (["--console", "8080"], "--console: '8080' is no address; expected HOST:PORT"),
        (["--console", "192.0.2.1:8080"], "console"),  # it is refused by the console's own settings
        (
            ["--console-tokens", "t"],
            "--console-tokens: console_tokens does nothing without --console; give both or neither",
        ),
        (["--clints", "3"], "No such option '--clints'"),
    ],
)
def test_bad_input_is_one_clear_line_and_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
):
    folder = str(tmp_path / "data")
    complete = "missing" in complaint
    base = [] if complete else ["--clients", "2", "--data-dir", folder, "--settings", "tiny"]
    given = [argument.format(dir=folder) for argument in arguments]
    code, line = answered(monkeypatch, capsys, "serve", *base, *given)
    assert code == 2
    assert complaint in line
    assert "secret" not in line
    assert "\n" not in line
    assert not (tmp_path / "data").exists()


def test_a_config_file_with_an_unknown_key_names_file_and_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = tmp_path / "aggregator.toml"
    config.write_text("clients = 2\nmin_client = 1\n")
    code, line = answered(monkeypatch, capsys, "serve", "--config", str(config))
    assert (code, line) == (2, "aggregator: aggregator.toml: unknown key 'min_client'; did you mean 'min_clients'?")


def test_a_task_file_with_an_impossible_task_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    task = tmp_path / "task.toml"
    task.write_text('image_channels = 2\nimage_size = 28\nclass_names = ["a", "b"]\n')
    arguments = ["serve", "--clients", "1", "--data-dir", str(tmp_path / "data"), "--task", str(task)]
    code, line = answered(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "task.toml" in line
    assert "image_channels is 2, expected 1 or 3" in line


def test_a_data_dir_of_another_fleet_and_metrics_for_everybody_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    claim_data_dir(tmp_path, fleet="other", role="aggregator").close()
    base = ["serve", "--clients", "1", "--data-dir", str(tmp_path), "--broker", "mqtt://127.0.0.1:1"]
    code, line = answered(monkeypatch, capsys, *base)
    assert code == 2
    assert "belongs to fleet 'other', this process is of fleet 'fleet'" in line
    code, line = answered(monkeypatch, capsys, *base, "--metrics", "0.0.0.0:0")
    assert code == 2
    assert "expected --metrics-token-file" in line


def test_status_shows_a_run_and_says_when_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    code, line = answered(monkeypatch, capsys, "status", "--data-dir", str(tmp_path))
    assert code == 2
    assert "no aggregator has run here" in line
    store = AggregatorStore(tmp_path)
    store.found(tiny_spec(), at=1.0)
    store.close()
    monkeypatch.setattr(sys, "argv", ["aggregator", "status", "--data-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "round 0: open, uploads: none yet" in shown
    assert "keep real samples" not in shown


def test_status_says_that_a_run_is_finished(tmp_path: Path):
    store = AggregatorStore(tmp_path)
    store.found(tiny_spec(), at=1.0)
    store.set_num_rounds(1)
    assert read_status(tmp_path).phase == "open"
    store.close_round(0, at=2.0)
    assert store.commit_round(0, StoredArtefacts((), "0" * 64), {}, at=3.0)
    assert read_status(tmp_path).lines()[1] == "finished after 1 round"
    store.set_num_rounds(2)  # the next start asks for more
    assert read_status(tmp_path).lines()[1] == "round 1: open, uploads: none yet"
    store.set_num_rounds(None)
    assert read_status(tmp_path).phase == "open"
    store.close()


def test_status_on_a_full_disk_blames_the_disk_and_not_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(_: AggregatorStore) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = 10  # SQLITE_IOERR, which has a name from Python 3.11 on
        raise error

    AggregatorStore(tmp_path).close()
    monkeypatch.setattr(AggregatorStore, "spec", full)
    code, line = answered(monkeypatch, capsys, "status", "--data-dir", str(tmp_path))
    assert code == 2
    assert "aggregator.sqlite can't be read, for the disk refuses (disk I/O error)" in line
    assert "damaged" not in line


def test_status_of_a_damaged_database_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "aggregator.sqlite").write_bytes(b"something else entirely, long enough to be read" * 10)
    code, line = answered(monkeypatch, capsys, "status", "--data-dir", str(tmp_path))
    assert code == 2
    assert "aggregator.sqlite is damaged" in line


def test_a_client_without_a_download_has_none_and_no_round(tmp_path: Path):
    store = AggregatorStore(tmp_path)
    store.found(tiny_spec(), 0.0)
    store.close()
    status = dataclasses.replace(read_status(tmp_path), clients=(ClientStatus("cam-1", -1, 0, 0),))
    assert status.lines()[-1] == "cam-1: no download yet"


def test_status_says_that_clients_keep_real_samples(tmp_path: Path):
    store = AggregatorStore(tmp_path)
    store.found(msgspec.structs.replace(tiny_spec(), method="ideal"), at=1.0)
    store.close()
    assert read_status(tmp_path).lines()[0].endswith(", clients keep real samples")


def test_the_command_line_is_answered_without_torch():
    code = "import replayfleet.aggregator.cli, sys; sys.exit('torch' in sys.modules or 'paho' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
