"""Boards are trees of files that the tests write: no Jetson was at hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import board_trees as trees

from replayfleet.devices.probing import Board, chosen, fitting, probe
from replayfleet.federation.errors import SettingsError


@pytest.mark.parametrize(
    ("board", "profile"),
    [
        (trees.ORIN_NANO, "jetson-orin-nano"),
        (trees.ORIN_NX, "jetson-orin-nx"),
        (trees.AGX_ORIN, "jetson-agx-orin"),
        (trees.THOR, "jetson-thor"),
        (trees.XAVIER_NX, "jetson-xavier"),
        (trees.AGX_XAVIER, "jetson-xavier"),
        (trees.RASPBERRY_PI, "arm-cpu"),
        (("Carrier of our own, Orin NX inside", ("acme,box", "nvidia,tegra234")), "jetson-orin-nx"),
        (("Carrier of our own", ("acme,box", "nvidia,tegra264")), "jetson-thor"),
        (("Jetson Nano Developer Kit", ("nvidia,p3449-0000-b00+p3448-0000-b00", "nvidia,tegra210")), "jetson"),
    ],
)
def test_auto_picks_the_boards_profile(board: tuple[str, tuple[str, ...]], profile: str, tmp_path: Path) -> None:
    found = probe(trees.board_tree(tmp_path, board), "aarch64")
    assert found.model == board[0]
    assert chosen("auto", found)[0].name == fitting(found).name == profile
    assert chosen("auto", found)[1] == ""
    if found.is_jetson:
        assert chosen("jetson", found)[0].name == profile
        assert chosen("jetson", found)[1] == ""


@pytest.mark.parametrize(
    ("part", "profile"),
    [
        ("p3767-0000", "jetson-orin-nx"),
        ("p3767-0001", "jetson-orin-nx"),
        ("p3767-0003", "jetson-orin-nano"),
        ("p3767-0004", "jetson-orin-nano"),
        ("p3767-0005", "jetson-orin-nano"),
        ("p3701-0004", "jetson-agx-orin"),
        ("p3701-0008", "jetson-agx-orin"),
        ("p3834-0008", "jetson-thor"),
        ("p2888-0004", "jetson-xavier"),
        ("p3668-0003", "jetson-xavier"),
    ],
)
def test_a_module_on_any_carrier_is_told_by_its_part_number(part: str, profile: str, tmp_path: Path) -> None:
    board = ("A carrier of our own", ("acme,box", f"nvidia,{part}", "nvidia,tegra-unheard-of"))
    assert fitting(probe(trees.board_tree(tmp_path, board, memory_kib=1 << 30), "aarch64")).name == profile


@pytest.mark.parametrize(("gib", "profile"), [(7, "orin-nano"), (15, "orin-nx"), (30, "agx-orin")])
def test_an_orin_whose_tree_names_no_module_is_told_by_its_memory(gib: int, profile: str, tmp_path: Path) -> None:
    board = ("Carrier", ("acme,box", "nvidia,tegra234"))
    assert fitting(probe(trees.board_tree(tmp_path, board, memory_kib=gib << 20))).name == f"jetson-{profile}"


def test_a_pc_is_a_cpu_or_with_a_gpu_a_cuda_box(tmp_path: Path) -> None:
    assert fitting(probe(trees.board_tree(tmp_path / "cpu"), "x86_64")).name == "cpu"
    found = probe(trees.gpu_tree(tmp_path / "gpu"), "x86_64")
    assert fitting(found).name == "cuda"
    assert found == Board(
        machine="x86_64",
        cuda="13.0.20250819",
        driver="580.65.06",
        gpus=("NVIDIA GeForce RTX 4090",),
        num_cores=16,
        memory_bytes=128 << 30,
    )
    assert found.describe() == (
        "x86_64 machine, GPU NVIDIA GeForce RTX 4090, driver 580.65.06, CUDA toolkit 13.0.20250819, 16 cores, 128.0 GiB"
    )


@pytest.mark.parametrize(
    ("release", "l4t", "jetpack"),
    [
        (trees.R36, (36, 4, 3), "6.2"),
        ("# R36 (release), REVISION: 4.0, GCID: 37537400\n", (36, 4, 0), "6.1"),
        ("# R38 (release), REVISION: 2.0, GCID: 41844464, BOARD: generic\n", (38, 2, 0), "7.0"),
        ("# R39 (release), REVISION: 2.1, GCID: 46758480, BOARD: generic\n", (39, 2, 1), "7.2"),
        ("# R35 (release), REVISION: 6.4, GCID: 1\n", (35, 6, 4), "5.1"),
        ("# R41 (release), REVISION: 0, GCID: 1\n", (41, 0, 0), ""),
        ("something else", None, ""),
    ],
)
def test_the_release_file_tells_l4t_and_jetpack(
    release: str, l4t: tuple[int, int, int] | None, jetpack: str, tmp_path: Path
) -> None:
    found = probe(trees.board_tree(tmp_path, trees.AGX_ORIN, release=release), "aarch64")
    assert (found.l4t, found.jetpack) == (l4t, jetpack)
    if l4t == (36, 4, 3):
        assert found.describe() == "NVIDIA Jetson AGX Orin Developer Kit, L4T 36.4.3 (JetPack 6.2), 6 cores, 7.3 GiB"


def test_cores_that_are_off_or_not_the_containers_are_not_counted(tmp_path: Path) -> None:
    trees.board_tree(tmp_path, cores="0-3,6,8-9", memory_kib=8 << 20)
    assert probe(tmp_path).num_cores == 7
    trees.write_tree(tmp_path, {"sys/fs/cgroup/cpu.max": "150000 100000\n", "sys/fs/cgroup/memory.max": "1073741824\n"})
    assert probe(tmp_path).num_cores == 2
    assert probe(tmp_path).memory_bytes == 1 << 30
    trees.write_tree(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert probe(tmp_path).num_cores == 7
    assert probe(tmp_path).memory_bytes == 8 << 30


def test_cores_that_a_cpuset_forbids_are_not_counted(tmp_path: Path) -> None:
    """As of ``docker run --cpuset-cpus``, ``AllowedCPUs=`` and ``taskset``: training took threads for all there are."""
    trees.board_tree(tmp_path, cores="0-3,6")
    trees.write_tree(tmp_path, {"proc/self/status": "Cpus_allowed:\t4e\nCpus_allowed_list:\t1-2,6-7\nThreads:\t1\n"})
    assert probe(tmp_path).num_cores == 3


def test_what_a_service_may_use_is_all_it_has(tmp_path: Path) -> None:
    trees.board_tree(tmp_path, cores="0-7", memory_kib=8 << 20)
    unit = "sys/fs/cgroup/system.slice/edge-client.service"
    files = {"proc/self/cgroup": "4:memory:/elsewhere\n0::/system.slice/edge-client.service\n"}
    files |= {f"{unit}/memory.max": "3221225472\n", f"{unit}/cpu.max": "max 100000\n"}
    trees.write_tree(tmp_path, {**files, "sys/fs/cgroup/system.slice/cpu.max": "200000 100000\n"})
    assert probe(tmp_path).memory_bytes == 3 << 30
    assert probe(tmp_path).num_cores == 2


def test_a_jetson_container_hides_the_device_tree_and_still_is_a_jetson(tmp_path: Path) -> None:
    found = probe(trees.board_tree(tmp_path, release=trees.R36), "aarch64")
    assert found.is_jetson
    assert fitting(found).name == "jetson"
    assert chosen("jetson-orin-nx", found)[1] == ""


def test_jetson_off_a_jetson_and_another_jetson_than_this_one_are_noted_in_one_line(tmp_path: Path) -> None:
    pc = probe(trees.board_tree(tmp_path / "pc"), "x86_64")
    profile, note = chosen("jetson", pc)
    assert profile.name == "jetson"
    assert "expects a Jetson, but this is an x86_64 machine without a device tree; going on" in note
    nano = probe(trees.board_tree(tmp_path / "nano", trees.ORIN_NANO), "aarch64")
    profile, note = chosen("jetson-thor", nano)
    assert profile.name == "jetson-thor"
    assert note.endswith("which --device jetson-orin-nano is made for")
    assert chosen("cpu", nano)[0].name == "cpu"
    assert chosen("cpu", nano)[1] == ""


def test_an_empty_machine_is_still_described(tmp_path: Path) -> None:
    found = probe(tmp_path, "riscv64")
    assert found.num_cores >= 1
    assert found.memory_bytes == 0
    assert fitting(found).name == "cpu"
    with pytest.raises(SettingsError, match="unknown device"):
        chosen("toaster", found)
