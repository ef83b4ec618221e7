"""Errors name the file that can't be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from replayfleet.export import files
from replayfleet.export.files import read_class_names, read_file
from replayfleet.export.parameters import read_parameters
from replayfleet.federation.errors import SettingsError


def test_parameters_come_back_as_they_were_saved(tmp_path: Path):
    path = tmp_path / "p.safetensors"
    path.write_bytes(save({"w": np.eye(2, dtype=np.float32), "n": np.array(3)}))
    found = read_parameters(path)
    assert found["w"].dtype == np.float32
    assert found["n"] == 3


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\xff" * 100, save({"w": np.eye(2)})[:-1]])
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, data: bytes):
    path = tmp_path / "p.safetensors"
    path.write_bytes(data)
    with pytest.raises(SettingsError, match=r"p\.safetensors: not a safetensors file"):
        read_parameters(path)


def test_missing_and_oversized_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match=r"absent: can't be read \(No such file"):
        read_file(tmp_path / "absent")
    (tmp_path / "large").write_bytes(b"12345")
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 4)
    with pytest.raises(SettingsError, match="has 5 bytes, at most 4"):
        read_file(tmp_path / "large")


def test_class_names_come_from_a_list_or_a_file(tmp_path: Path):
    assert read_class_names("cat, dog") == ("cat", "dog")
    path = tmp_path / "classes.txt"
    path.write_text("cat\n\ntraffic light\n")
    assert read_class_names(str(path)) == ("cat", "traffic light")
    many = [f"class {index}" for index in range(100)]  # longer than a path may be
    assert read_class_names(",".join(many)) == tuple(many)


def test_a_file_of_names_is_read_as_notepad_writes_it_and_only_as_what_it_says(tmp_path: Path):
    """The first class had an invisible mark before its name, and a letter of Latin-1 became a question mark."""
    path = tmp_path / "classes.txt"
    path.write_bytes("Bär\r\ndog\r\n".encode("utf-8-sig"))
    assert read_class_names(str(path)) == ("Bär", "dog")
    path.write_bytes("Bär\ndog\n".encode("latin-1"))
    with pytest.raises(SettingsError, match=r"classes\.txt: isn't UTF-8 \(invalid continuation byte at byte 1\)"):
        read_class_names(str(path))


@pytest.mark.parametrize(("text", "expected"), [("cat", "gives 1 names"), ("a,b,a", "'a' is there more than once")])
def test_class_names_that_make_no_task_are_refused(text: str, expected: str):
    with pytest.raises(SettingsError, match=expected):
        read_class_names(text)
