from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.settings import Option, check_settings, read_settings, settings_from, settings_of


def _even(value: int) -> None:
    if value % 2:
        raise ValueError(f"frames is {value}, expected an even number")


@dataclass(frozen=True, kw_only=True)
class Edge:
    data_dir: Annotated[Path, Option("Folder of everything.")]
    client_id: Annotated[str, Option("Name.")] = "cam-1"
    frame_rate: Annotated[float, Meta(gt=0, le=60), Option("Pictures a second.", unit="Hz")] = 10.0
    frames: Annotated[int, Option("Frames.", check=_even)] = 2
    threads: Annotated[int, Meta(ge=1), Option("Threads.")] = 1
    most_threads: Annotated[int | None, Meta(ge=1), Option("Threads at most.")] = None
    view: Annotated[Literal["whole", "crops"], Option("View.")] = "whole"
    sizes: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Option("Sizes.")] = (1,)
    classes: Annotated[tuple[str, ...], Option("Classes.")] = ()
    stay: Annotated[bool, Option("Stay.")] = False
    data_root: Annotated[Path | None, Option("Data.", flags="--data")] = None
    data_key: Annotated[str, Option("Key of the data.", needs="data_root")] = ""
    set: Annotated[dict[str, Any], Option("Settings of the method.")] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.most_threads is not None and self.threads > self.most_threads:
            raise SettingsError(f"threads is {self.threads}, expected at most most_threads, {self.most_threads}")


@dataclass(frozen=True)
class Other:
    threads: int = 1
    rooms: int = 3


@dataclass(frozen=True)
class Boxes:
    boxes: tuple[tuple[float, float], ...]


def read(file: Path | None = None, environment: dict[str, str] | None = None, **given: Any) -> Edge:
    return read_settings(Edge, file, {"data_dir": "d", **given}, environment=environment or {})


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "edge.toml"
    path.write_text(text)
    return path


def test_a_file_of_an_editor_that_marks_its_byte_order_is_read(tmp_path: Path) -> None:
    path = tmp_path / "edge.toml"
    path.write_text("threads = 2\n", encoding="utf-8-sig")
    assert read(path).threads == 2


def test_the_command_line_wins_over_the_environment_that_over_the_file_that_over_the_default(tmp_path: Path) -> None:
    path = written(tmp_path, 'threads = 2\nframe_rate = 5\nclient_id = "file"\nstay = true\n')
    environment = {"REPLAYFLEET_THREADS": "3", "REPLAYFLEET_CLIENT_ID": "environment", "REPLAYFLEET_VIEW": ""}
    settings = read(path, environment, threads="4", client_id=None, stay=False)
    assert settings == Edge(data_dir=Path("d"), threads=4, frame_rate=5.0, client_id="environment", stay=False)


def test_texts_become_what_the_field_is() -> None:
    environment = {
        "REPLAYFLEET_CLASSES": "cat dog",
        "REPLAYFLEET_STAY": "true",
        "REPLAYFLEET_DATA": "/data",
        "REPLAYFLEET_SET": "gate=false tau=0.5",
    }
    found = read(None, environment, frame_rate="2.5", most_threads="7")
    assert (found.classes, found.stay, found.data_root) == (("cat", "dog"), True, Path("/data"))
    assert (found.frame_rate, found.most_threads, found.set) == (2.5, 7, {"gate": "false", "tau": "0.5"})


def test_tables_are_merged_key_by_key(tmp_path: Path) -> None:
    path = written(tmp_path, "[set]\na = 1\nb = 2\n")
    assert read(path, set=("b=3", "c=4")).set == {"a": 1, "b": "3", "c": "4"}


@pytest.mark.parametrize(
    ("line", "environment", "given", "complaint"),
    [
        ('threads = "2"', {}, {}, "edge.toml: threads is '2', expected a whole number, at least 1"),
        ("threads = 1.5", {}, {}, "edge.toml: threads is 1.5, expected a whole number, at least 1"),
        ("threads = true", {}, {}, "edge.toml: threads is True, expected a whole number, at least 1"),
        ("client_id = 7", {}, {}, "edge.toml: client_id is 7, expected a text"),
        ("frame_rate = nan", {}, {}, "edge.toml: frame_rate is nan, expected a number, more than 0, at most 60"),
        ("data_root = 3", {}, {}, "edge.toml: data_root is 3, expected a path"),
        ("data_root = ''", {}, {}, "edge.toml: data_root: expected a path, not an empty text"),
        ("classes = ['a', 1]", {}, {}, "edge.toml: classes is a list, expected a list of texts"),
        (
            "sizes = [1, 0]",
            {},
            {},
            "edge.toml: sizes is [1, 0], expected a list, each of which is a whole number",
        ),
        ("frames = 3", {}, {}, "edge.toml: frames is 3, expected an even number"),
        (
            "",
            {"REPLAYFLEET_THREADS": "0"},
            {},
            "REPLAYFLEET_THREADS is '0', expected a whole number",
        ),
        ("", {"REPLAYFLEET_FRAMES": "5"}, {}, "REPLAYFLEET_FRAMES is 5, expected an even number"),
        ("", {}, {"data_root": ""}, "--data: expected a path, not an empty text"),
        ("", {}, {"view": "crop"}, "--view is 'crop', expected whole or crops"),
        ("", {}, {"set": ("a",)}, "--set a: expected KEY=VALUE"),
        ("", {"REPLAYFLEET_SET": "a"}, {}, "REPLAYFLEET_SET a: expected KEY=VALUE"),
        ("", {"REPLAYFLEET_SET": "a=1 a=2"}, {}, "REPLAYFLEET_SET a is given twice"),
        (
            "most_threads = 2",
            {},
            {"threads": "3"},
            "threads is 3, expected at most most_threads, 2 (threads: --threads; most_threads: edge.toml)",
        ),
        ("data_key = 'k'", {}, {}, "edge.toml: data_key does nothing without --data; give both or neither"),
        ("", {}, {"data_key": "k"}, "--data-key: data_key does nothing without --data; give both or neither"),
        ("frame_rat = 5", {}, {}, "edge.toml: unknown key 'frame_rat'; did you mean 'frame_rate'?"),
    ],
)
def test_an_error_names_the_value_what_was_expected_and_where_it_was_written(
    tmp_path: Path, line: str, environment: dict[str, str], given: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        read(written(tmp_path, line + "\n"), environment, **given)
    assert str(caught.value).startswith(complaint)


def test_what_is_missing_is_named_with_the_three_places_where_it_can_stand() -> None:
    with pytest.raises(SettingsError, match="expected --data-dir, 'data_dir' in a --config file, or REPLAYF"):
        read_settings(Edge, environment={"HOME": "/"})
    with pytest.raises(SettingsError, match=r"^data_dir is missing: expected --data-dir; nothing was started"):
        read_settings(Edge, environment={})


def test_a_missing_or_broken_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read(tmp_path / "none.toml")
    with pytest.raises(SettingsError, match="not valid TOML"):
        read(written(tmp_path, "threads ="))


def test_settings_made_in_code_are_checked_as_well() -> None:
    with pytest.raises(SettingsError, match="threads is 0, expected a whole number, at least 1"):
        Edge(data_dir=Path("d"), threads=0)
    with pytest.raises(SettingsError, match="expected an even number"):
        Edge(data_dir=Path("d"), frames=1)


def test_of_anothers_file_only_the_keys_in_common_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, "rooms = 9\nthreads = 2\n")
    assert read_settings(Edge, path, {"data_dir": "d"}, environment={}, file_of=Other).threads == 2
    with pytest.raises(SettingsError, match="unknown key 'stay'"):
        read_settings(Edge, written(tmp_path, "stay = true"), {"data_dir": "d"}, environment={}, file_of=Other)


def test_plain_dataclasses_are_filled_from_a_table() -> None:
    assert settings_from(Other, {"rooms": 2}, "task.toml") == Other(rooms=2)
    with pytest.raises(SettingsError, match=r"^task.toml: rooms is 'x', expected a whole number$"):
        settings_from(Other, {"rooms": "x"}, "task.toml")
    with pytest.raises(SettingsError, match=r"^task.toml: unknown key 'room'; did you mean 'rooms'\?$"):
        settings_from(Other, {"room": 2}, "task.toml")
    with pytest.raises(SettingsError, match="boxes is a list, expected a list, each of which is a list of 2, each of "):
        settings_from(Boxes, {"boxes": [[0.5]]}, "task.toml")


def test_names_bounds_and_choices_are_told_in_words() -> None:
    known = settings_of(Edge)
    assert (known["data_dir"].flag, known["data_dir"].variable) == ("--data-dir", "REPLAYFLEET_DATA_DIR")
    assert known["data_root"].variable == "REPLAYFLEET_DATA"
    assert known["frame_rate"].bounds == "more than 0, at most 60"
    assert (known["view"].choices, known["most_threads"].bounds) == (("whole", "crops"), "at least 1")
    assert [name for name, setting in known.items() if setting.required] == ["data_dir"]
