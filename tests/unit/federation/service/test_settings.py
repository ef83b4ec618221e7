from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.settings import read_settings


@dataclass(frozen=True)
class Tls:
    ca: Path | None = None
    insecure: bool = False


@dataclass(frozen=True)
class Edge:
    client_id: str = "cam-1"
    frame_rate: float = 10.0
    threads: int = 1
    classes: tuple[str, ...] = ()
    tls: Tls = field(default_factory=Tls)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "edge.toml"
    path.write_text(text)
    return path


def test_defaults_file_and_command_line_override_one_another_in_this_order(tmp_path: Path):
    path = written(tmp_path, 'threads = 2\nframe_rate = 5\nclasses = ["a"]\n[tls]\nca = "ca.pem"\n')
    overrides = {"threads": 3, "client_id": None, "tls": {"insecure": True, "ca": None}}
    settings = read_settings(Edge, path, overrides)
    assert settings == Edge(threads=3, frame_rate=5.0, classes=("a",), tls=Tls(Path("ca.pem"), insecure=True))


def test_an_unknown_key_is_named_with_its_nearest_neighbour(tmp_path: Path):
    path = written(tmp_path, "frame_rat = 5\n")
    with pytest.raises(SettingsError, match=r"^edge.toml: unknown key 'frame_rat'; did you mean 'frame_rate'\?$"):
        read_settings(Edge, path)


def test_an_unknown_key_of_a_table_is_named_with_its_table(tmp_path: Path):
    path = written(tmp_path, "[tls]\ninsecur = true\n")
    with pytest.raises(SettingsError, match=r"unknown key 'tls.insecur'; did you mean 'insecure'\?"):
        read_settings(Edge, path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('threads = "two"', "edge.toml: threads: expected int, got str"),
        ("threads = 1.5", "edge.toml: threads: expected int, got float"),
        ("threads = true", "edge.toml: threads: expected int, got bool"),
        ("client_id = 7", "edge.toml: client_id: expected str, got int"),
        ("tls = 3", "edge.toml: tls: expected object, got int"),
        ("[tls]\nca = 3", "edge.toml: tls.ca: expected"),
    ],
)
def test_a_wrong_type_is_named_with_what_was_expected(tmp_path: Path, line: str, complaint: str):
    with pytest.raises(SettingsError) as caught:
        read_settings(Edge, written(tmp_path, line + "\n"))
    assert str(caught.value).startswith(complaint)


def test_a_missing_or_broken_file_is_one_clear_line(tmp_path: Path):
    with pytest.raises(SettingsError, match="No such file"):
        read_settings(Edge, tmp_path / "none.toml")
    with pytest.raises(SettingsError, match="not valid TOML"):
        read_settings(Edge, written(tmp_path, "threads ="))
