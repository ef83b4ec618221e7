from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.linked import linked_library

from replayfleet.devices.shared_libraries import is_missing, missing_in, missing_libraries, needed_libraries


def test_all_that_a_library_lacks_is_named_at_once_the_loaders_complaint_first(tmp_path: Path) -> None:
    library = linked_library(tmp_path, "provider", "surely-absent", "also-absent")
    assert needed_libraries(library) == ("libsurely-absent.so", "libalso-absent.so")
    assert missing_libraries(library) == ("libsurely-absent.so", "libalso-absent.so")


def test_a_library_that_loads_lacks_nothing(tmp_path: Path) -> None:
    assert missing_libraries(linked_library(tmp_path, "complete")) == ()


def test_what_is_no_library_lacks_nothing_either(tmp_path: Path) -> None:
    text = tmp_path / "libtext.so"
    text.write_text("INPUT(libother.so)")
    assert missing_libraries(text) == ()
    assert needed_libraries(text) == ()
    assert missing_libraries(tmp_path / "nothing.so") == ("nothing.so",)


@pytest.mark.parametrize("length", [0, 30, 64, 120, 200])
def test_a_truncated_library_is_no_reason_to_fail(length: int, tmp_path: Path) -> None:
    whole = linked_library(tmp_path, "whole", "absent").read_bytes()
    (tmp_path / "libpart.so").write_bytes(whole[:length])
    assert missing_libraries(tmp_path / "libpart.so") in {(), ("libabsent.so",)}


def test_the_interpreter_needs_the_c_library() -> None:
    assert any(name.startswith("libc.so") for name in needed_libraries(Path(sys.executable).resolve()))
    assert not is_missing("libc.so.6")
    assert is_missing("libsurely-absent.so.7")


def test_the_loaders_message_names_the_library() -> None:
    text = "with error: libcublasLt.so.13: cannot open shared object file: No such file or directory"
    assert missing_in(text) == "libcublasLt.so.13"
    assert missing_in("undefined symbol: Provider_GetHost") == ""
