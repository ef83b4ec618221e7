"""Sensors as a Jetson and a PC show them: trees of files that the tests write, for no Jetson was at hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from replayfleet.devices import limits
from replayfleet.devices.budget import TrainingAllowance
from replayfleet.devices.jtop import Jtop
from replayfleet.devices.limits import Reading, Sensors, Throttle, parse_tegrastats

ORIN_LINE = (
    "11-21-2026 10:00:00 RAM 3021/7620MB (lfb 4x4MB) SWAP 0/3810MB (cached 0MB) CPU [12%@1510,5%@1510,off,off] "
    "EMC_FREQ 0% GR3D_FREQ 45% cpu@49.5C soc2@47.2C gpu@48.1C tj@49.5C cv0@-256C "
    "VDD_IN 5069mW/4990mW VDD_CPU_GPU_CV 1080mW/1012mW VDD_SOC 1440mW/1439mW"
)
NANO_LINE = "RAM 1500/3956MB CPU [10%@1479] PLL@35C PMIC@100C AO@42.5C POM_5V_IN 2500/2400 POM_5V_CPU 500/480"


def zone(root: Path, number: int, name: str, degrees: float, **trips: float) -> None:
    folder = root / f"sys/class/thermal/thermal_zone{number}"
    folder.mkdir(parents=True)
    folder.joinpath("type").write_text(f"{name}\n")
    folder.joinpath("temp").write_text(f"{int(1000 * degrees)}\n")
    for index, (kind, trip) in enumerate(trips.items()):
        folder.joinpath(f"trip_point_{index}_type").write_text(f"{kind}\n")
        folder.joinpath(f"trip_point_{index}_temp").write_text(f"{int(1000 * trip)}\n")


def ina3221(root: Path, number: int, **rails: tuple[int, int]) -> None:
    folder = root / f"sys/class/hwmon/hwmon{number}"
    folder.mkdir(parents=True)
    folder.joinpath("name").write_text("ina3221\n")
    for index, (label, (milli_volts, milli_amperes)) in enumerate(rails.items(), start=1):
        folder.joinpath(f"in{index}_label").write_text(f"{label}\n")
        folder.joinpath(f"in{index}_input").write_text(f"{milli_volts}\n")
        folder.joinpath(f"curr{index}_input").write_text(f"{milli_amperes}\n")
    folder.joinpath("in7_label").write_text("sum of shunt voltages\n")
    folder.joinpath("in7_input").write_text("120\n")


def test_the_zone_nearest_to_its_own_passive_trip_counts(tmp_path: Path) -> None:
    zone(tmp_path, 0, "cpu-thermal", 80.0, passive=99.0, critical=104.5)
    zone(tmp_path, 1, "gpu-thermal", 70.0, passive=72.0)
    zone(tmp_path, 2, "PMIC-Die", 100.0, passive=90.0)
    zone(tmp_path, 3, "cv0-thermal", -256.0)
    found = Sensors(TrainingAllowance(), tmp_path).read()
    assert (found.zone, found.temperature_c) == ("gpu-thermal", 70.0)
    assert found.over_c == pytest.approx(3.0)


def test_of_zones_with_one_name_none_hides_another(tmp_path: Path) -> None:
    """PCs have several called acpitz; the last one was read alone."""
    zone(tmp_path, 0, "acpitz", 90.0, passive=80.0)
    zone(tmp_path, 1, "acpitz", 27.8, passive=119.0)
    found = Sensors(TrainingAllowance(), tmp_path).read()
    assert (found.zone, found.temperature_c, found.over_c) == ("acpitz", 90.0, pytest.approx(15.0))
    zone(tmp_path, 2, "acpitz", 96.0, passive=80.0)
    assert Sensors(TrainingAllowance(), tmp_path).read().zone == "acpitz thermal_zone2"


def test_a_limit_of_the_operators_holds_for_zones_without_one_and_below_theirs(tmp_path: Path) -> None:
    zone(tmp_path, 0, "cpu-thermal", 80.0, passive=99.0)
    zone(tmp_path, 1, "acpitz", 60.0)
    found = Sensors(TrainingAllowance(max_temperature_c=75.0), tmp_path).read()
    assert found.zone == "cpu-thermal"
    assert found.over_c == pytest.approx(5.0)
    assert Sensors(TrainingAllowance(), tmp_path).read().over_c == pytest.approx(80 - 94)


def test_zones_without_any_limit_are_shown_and_limit_nothing(tmp_path: Path) -> None:
    zone(tmp_path, 0, "acpitz", 27.8, critical=105.0)
    assert Sensors(TrainingAllowance(), tmp_path).read() == Reading(27.8, "acpitz", None, None)


def test_the_boards_input_rail_counts_where_it_is_known_and_else_the_sum(tmp_path: Path) -> None:
    ina3221(tmp_path, 3, VDD_IN=(5000, 1200), VDD_CPU_GPU_CV=(5000, 300), VDD_SOC=(5000, 200))
    assert Sensors(TrainingAllowance(), tmp_path).read().power_w == pytest.approx(6.0)
    agx = tmp_path / "agx"
    ina3221(agx, 0, VDD_GPU_SOC=(19000, 400), VDD_CPU_CV=(19000, 100))
    ina3221(agx, 1, VIN_SYS_5V0=(5000, 1000))
    assert Sensors(TrainingAllowance(), agx).read().power_w == pytest.approx(14.5)


def test_a_chip_that_tells_its_power_itself_is_believed_and_others_are_no_power_sensors(tmp_path: Path) -> None:
    for number, name in enumerate(("ina238", "nvme", "coretemp")):
        folder = tmp_path / f"sys/class/hwmon/hwmon{number}"
        folder.mkdir(parents=True)
        folder.joinpath("name").write_text(name)
        folder.joinpath("power1_input").write_text("25500000")
    assert Sensors(TrainingAllowance(), tmp_path).read().power_w == pytest.approx(25.5)


def test_sensors_that_are_off_or_absent_are_left_out(tmp_path: Path) -> None:
    assert Sensors(TrainingAllowance(), tmp_path, tegrastats="/does/not/exist").read() == Reading()
    zone(tmp_path, 0, "cv1-thermal", 50.0)
    (tmp_path / "sys/class/thermal/thermal_zone0/temp").unlink()
    (tmp_path / "sys/class/thermal/thermal_zone0/temp").mkdir()  # reading it fails, as a zone's whose unit sleeps
    assert Sensors(TrainingAllowance(), tmp_path).read() == Reading()


def test_tegrastats_is_asked_where_sysfs_tells_nothing_and_does_not_stay(tmp_path: Path) -> None:
    command = tmp_path / "tegrastats"
    command.write_text(f"#!{sys.executable}\nimport time\nprint({ORIN_LINE!r}, flush=True)\ntime.sleep(600)\n")
    command.chmod(0o755)
    found = Sensors(TrainingAllowance(max_temperature_c=40.0), tmp_path, tegrastats=str(command)).read()
    assert found == Reading(49.5, "cpu", 9.5, 5.069)


JTOP = """
import time
class jtop:
    def __init__(self, interval): self.interval = interval / 20
    temperature = {"cpu": {"temp": 61.5, "online": True}, "cv0": {"temp": -256, "online": False}, "PMIC": {"temp": 100}}
    power = {"rail": {}, "tot": {"power": 7250, "avg": 7000}}
    def __enter__(self): return self
    def __exit__(self, *_): return None
    def ok(self): time.sleep(self.interval); return True
"""


def test_jtop_is_asked_where_its_socket_is_all_that_a_container_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, root = tmp_path / "packages", tmp_path / "root"
    packages.mkdir()
    (packages / "jtop.py").write_text(JTOP)  # a stand-in: jtop's service runs on Jetsons only
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    allowance = TrainingAllowance(max_temperature_c=60.0)
    assert Sensors(allowance, root, tegrastats="/does/not/exist").read() == Reading()
    (root / "run").mkdir(parents=True)
    (root / "run/jtop.sock").touch()
    sensors = Sensors(allowance, root, tegrastats="/does/not/exist")
    for _ in range(2):
        assert sensors.read() == Reading(61.5, "cpu", 1.5, 7.25)
    sensors.close()


@pytest.mark.parametrize(
    ("client", "why"), [("import time; time.sleep(600)", "no reading within 1 s"), ("raise SystemExit(3)", "ended")]
)
def test_a_jtop_that_hangs_or_fails_is_told_of_once_and_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, client: str, why: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "jtop.py").write_text(client)
    jtop = Jtop(timeout_s=1.0 if "sleep" in client else 20.0)
    for _ in range(3):
        assert jtop.read() == ({}, None)
    assert len(caplog.records) == 1
    assert why in caplog.text


def test_lines_of_tegrastats_old_and_new() -> None:
    zones, power_w = parse_tegrastats(ORIN_LINE)
    assert zones == {"cpu": (49.5, None), "soc2": (47.2, None), "gpu": (48.1, None), "tj": (49.5, None)}
    assert power_w == pytest.approx(5.069)
    assert parse_tegrastats(NANO_LINE) == ({"PLL": (35.0, None), "AO": (42.5, None)}, 2.5)
    assert parse_tegrastats("") == ({}, None)


def test_training_is_slowed_while_too_hot_stopped_when_much_too_hot_and_given_back_slowly() -> None:
    throttle = Throttle(TrainingAllowance())

    def at(over_c: float) -> float:
        return throttle.update(Reading(80.0 + over_c, "cpu", over_c))

    assert [at(over_c) for over_c in (-20, 1, 1, 1, 1)] == [1.0, 0.5, 0.25, 0.125, 0.1]
    assert throttle.reason == "cpu is 81 degrees, 1 above its limit"
    assert at(6) == 0.0
    assert at(-1) == 0.0  # near the limit nothing changes
    assert [round(at(-4), 1) for _ in range(10)][:3] == [0.1, 0.2, 0.3]
    assert throttle.time_share == 1.0
    assert throttle.reason == ""


def test_while_speed_is_given_back_the_reason_is_told_as_an_earlier_one() -> None:
    throttle = Throttle(TrainingAllowance(max_power_w=10.0))
    for power_w in (20.0, 20.0, 5.0, 5.0):
        throttle.update(Reading(power_w=power_w))
    assert throttle.reason == "earlier: the board draws 20.0 W, expected at most 10"
    throttle.update(Reading(power_w=11.0))
    assert throttle.reason == "the board draws 11.0 W, expected at most 10"


def test_power_over_its_limit_slows_training_too_and_an_unknown_power_does_not() -> None:
    throttle = Throttle(TrainingAllowance(max_power_w=10.0))
    assert throttle.update(Reading()) == 1.0
    assert throttle.update(Reading(power_w=11.0)) == 0.5
    assert throttle.reason == "the board draws 11.0 W, expected at most 10"
    assert throttle.update(Reading(power_w=9.8)) == 0.5
    assert throttle.update(Reading(power_w=9.0)) == pytest.approx(0.6)


@pytest.mark.parametrize(
    "script",
    [
        "cat /dev/zero",
        "printf 'cpu@49.5C' && exec sleep 1000",
        "exec sleep 1000",
        "printf 'cpu@1.2.3C VDD_IN %0400dmW/1mW\\377\\n' 7",
        "printf 'cpu@99999999C gpu@inf C tj@900C\\n'",
        "exit 3",
    ],
)
def test_a_tegrastats_that_lies_never_ends_or_says_nothing_takes_neither_memory_nor_long(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ANSWER_S", 0.5)
    command = tmp_path / "tegrastats"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    found = Sensors(TrainingAllowance(max_temperature_c=40.0), tmp_path, tegrastats=str(command)).read()
    assert found.power_w is None
    assert found.temperature_c in {None, 49.5}


@pytest.mark.parametrize("said", ["inf", "nan", "1e30", "-5"])
def test_a_zone_that_no_board_could_have_is_no_sensor(said: str, tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/thermal/thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "type").write_text("cpu\n")
    (zone / "temp").write_text(f"{said}\n")
    assert Sensors(TrainingAllowance(), tmp_path, tegrastats="/does/not/exist").read() == Reading()
