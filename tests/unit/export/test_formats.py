"""The table of formats refuses what it has no place for, and help and docs say what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from replayfleet.devices.probing import fitting, probe
from replayfleet.devices.profiles import PROFILES
from replayfleet.export.formats import (
    FORMATS,
    KINDS,
    OPTIONS,
    check_combination,
    chosen_format,
    find_format,
    option_help,
)
from replayfleet.federation.errors import SettingsError

PAGE = Path(__file__).parents[3] / "docs" / "export.md"


def refusal(kind: str, name: str, *given: str) -> str:
    with pytest.raises(SettingsError) as caught:
        check_combination(kind, find_format(name), given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("onnx-int", "onnx-int8"), ("torchscrpt", "torchscript"), ("FP16", "'onnx-fp16'"), ("", "onnx-int8")],
)
def test_an_unknown_format_gets_the_nearest_name(wrong: str, right: str):
    """An empty one, of a script whose variable isn't set, was taken for float32."""
    with pytest.raises(SettingsError, match=f"unknown format '{wrong}'.*{right}"):
        chosen_format(wrong, None)


def test_a_kind_that_a_format_can_not_hold_gets_the_nearest_format():
    assert "can't hold a sampler; did you mean 'onnx-fp16'?" in refusal("sampler", "onnx-int8")
    assert "did you mean 'onnx'?" in refusal("sampler", "torchscript")


def test_an_option_of_another_format_names_the_formats_that_take_it():
    assert "did you mean --format onnx?" in refusal("task", "torchscript", "split")
    assert "did you mean --format onnx-fp16 or onnx-int8?" in refusal("task", "onnx", "held")
    assert "did you mean --format onnx-int8?" in refusal("task", "onnx-fp16", "samples")


def test_an_option_that_the_kind_has_no_use_for_says_why():
    assert "draw their own inputs from --seed" in refusal("sub-generator", "onnx-int8", "calibration")
    assert "computed into its graph" in refusal("sampler", "onnx", "split")


def test_a_board_says_the_format_that_serves_quickest_there():
    assert {chosen_format(None, name).name for name in ("jetson-orin-nano", "jetson-thor", "cuda")} == {"onnx-fp16"}
    assert {chosen_format(None, name).name for name in ("cpu", "arm-cpu")} == {"onnx"}
    assert chosen_format(None, "auto") == chosen_format(None, fitting(probe()).name)
    assert chosen_format(None, None).name == "onnx"
    assert chosen_format("onnx-int8", None).name == "onnx-int8"


def test_every_board_has_a_format_that_holds_every_kind():
    assert all(chosen_format(None, name).kinds == KINDS for name in PROFILES)


def test_every_row_is_whole():
    names = {option.name for option in OPTIONS}
    for row in FORMATS:
        assert set(row.options) <= names
        assert set(row.kinds) <= set(KINDS)
        assert row.kinds == KINDS or find_format(row.instead).kinds == KINDS
        assert (row.max_loss_points is None) == (row.max_spreads is None)
        check_combination(row.kinds[0], row, [])
    assert all(option.why_not or option.kinds == KINDS for option in OPTIONS)
    assert len({row.file_name("task") for row in FORMATS}) == len(FORMATS)


def test_help_says_which_formats_take_an_option():
    assert option_help("samples").endswith("[onnx-int8]")
    assert option_help("held").endswith("[onnx-fp16, onnx-int8; for task and detector]")


def markdown_table() -> str:
    lines = ["| `--format` | in the file | for | options | may lose |", "|---|---|---|---|---|"]
    for row in FORMATS:
        kinds = "all kinds" if row.kinds == KINDS else ", ".join(row.kinds)
        options = ", ".join(f"`--{option}`" for option in row.options) or "none"
        loss = "nothing: exact to parity"
        if row.max_loss_points is not None:
            loss = f"{row.max_loss_points:g} point{'s' if row.max_loss_points != 1 else ''}"
        lines.append(f"| `{row.name}` | {row.holds} | {kinds} | {options} | {loss} |")
    return "\n".join(lines)


def test_the_page_holds_the_table():
    assert markdown_table() in PAGE.read_text()
