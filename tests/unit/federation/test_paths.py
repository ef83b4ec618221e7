from __future__ import annotations

from pathlib import Path

import pytest
from support.lease import lent

from replayfleet.federation.paths import given_path, read_regular, without_machine


@pytest.mark.parametrize(
    ("word", "noted"),
    [
        ("/srv/data", "data"),
        ("/srv/my data/", "my data"),
        ("--data-root=/srv/data", "--data-root=data"),
        ("runs/fedavg", "runs/fedavg"),
        ("--set", "--set"),
        ("replay=1/2", "replay=1/2"),
        ("a=b=/srv/c", "a=b=c"),
        ("/srv/erdfr+shots=25/seed-0", "seed-0"),
        ("--out=/srv/erdfr+shots=25/seed=0", "--out=seed=0"),
    ],
)
def test_of_an_absolute_path_a_noted_command_keeps_the_last_name(word: str, noted: str):
    assert without_machine(["fleet-sim", word]) == ["fleet-sim", noted]


def test_a_home_is_filled_in_where_no_shell_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/vera")
    assert [given_path(text) for text in ("~", "~/data")] == [Path("/home/vera"), Path("/home/vera/data")]
    assert [str(given_path(text)) for text in ("~old", "./~/data", "a/~")] == ["~old", "~/data", "a/~"]


def test_a_file_on_which_somebody_has_a_lease_is_read_once_that_is_given_back(tmp_path: Path):
    path = tmp_path / "names.txt"
    path.write_bytes(b"car")
    with lent(path):
        assert read_regular(path) == b"car"
