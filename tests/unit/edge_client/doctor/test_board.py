from __future__ import annotations

import sys
from pathlib import Path

import onnxruntime
import pytest
from support import board_trees as trees

from replayfleet.devices.probing import chosen, probe
from replayfleet.edge_client.doctor import board as boards
from replayfleet.edge_client.doctor.board import installed, look_at_board, look_at_packages, look_at_python
from replayfleet.edge_client.doctor.findings import Status


def test_a_board_is_told_with_the_profile_that_fits_it(tmp_path: Path) -> None:
    board = probe(trees.board_tree(tmp_path, trees.ORIN_NX, release=trees.R36, memory_kib=15_600_000), "aarch64")
    (found,) = look_at_board(board, *chosen("auto", board))
    assert found.status == Status.OK
    assert "L4T 36.4.3 (JetPack 6.2)" in found.found
    assert "--device jetson-orin-nx" in found.found
    assert found.facts["l4t"] == "36.4.3"
    assert found.facts["profile"] == "jetson-orin-nx"


def test_a_profile_for_another_board_and_too_little_memory_are_warnings(tmp_path: Path) -> None:
    board = probe(trees.board_tree(tmp_path / "nano", trees.ORIN_NANO), "aarch64")
    (found,) = look_at_board(board, *chosen("jetson-thor", board))
    assert found.status == Status.WARNING
    assert "--device jetson-orin-nano is made for" in found.found
    small = probe(trees.board_tree(tmp_path / "small", trees.AGX_ORIN, memory_kib=4 << 20), "aarch64")
    (found,) = look_at_board(small, *chosen("auto", small))
    assert found.status == Status.WARNING
    assert "32 GiB and more" in found.found


def test_packages_tell_version_and_origin_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cv2", raising=False)
    found = {finding.check: finding for finding in look_at_packages(probe())}
    assert set(found) == {"package.onnxruntime", "package.opencv", "package.torch"}
    assert "cv2" not in sys.modules
    runtime = found["package.onnxruntime"]
    assert runtime.facts["version"] == onnxruntime.__version__
    assert Path(runtime.facts["folder"]) == Path(str(onnxruntime.__file__)).parent.parent
    assert look_at_python()[0].facts["executable"] == sys.executable


def test_what_is_not_installed_is_told_and_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("onnxruntime", "cv2", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    pc = {finding.check: finding for finding in look_at_packages(probe(tmp_path, "x86_64"))}
    assert pc["package.onnxruntime"].status == Status.FAILURE
    assert pc["package.opencv"].status == pc["package.torch"].status == Status.WARNING
    jetson = look_at_packages(probe(trees.board_tree(tmp_path, trees.THOR), "aarch64"))
    assert "python3-opencv" in jetson[1].advice
    assert "JetPack" in jetson[0].advice


def test_two_packages_that_bring_the_same_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "_distributions", lambda module, folder: ["onnxruntime", "numpy"])
    found = look_at_packages(probe())[0]
    assert found.status == Status.WARNING
    assert "pip uninstall onnxruntime numpy" in found.advice


def test_a_module_without_a_package_tells_its_own_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fromjetpack").mkdir()
    (tmp_path / "fromjetpack" / "__init__.py").write_text("__version__ = '4.8.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = installed("fromjetpack")
    assert (package.version, package.folder, package.installer) == ("4.8.0", str(tmp_path), "")
    assert installed("surely_absent_module") is None
