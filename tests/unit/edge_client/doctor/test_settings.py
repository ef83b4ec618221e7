from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from replayfleet.devices.profiles import REQUIRABLE
from replayfleet.edge_client.doctor.doctor import checks
from replayfleet.edge_client.doctor.settings import DoctorSettings
from replayfleet.edge_client.settings import ClientSettings
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.settings import read_settings

ROOT = Path(__file__).parents[4]


def read_doctor_settings(path: Path | None, given: dict[str, Any]) -> DoctorSettings:
    return read_settings(DoctorSettings, path, given, environment={}, file_of=ClientSettings)


def test_a_clients_own_file_is_taken_as_it_is_and_the_command_line_wins(tmp_path: Path) -> None:
    config = tmp_path / "edge.toml"
    config.write_text(
        'broker = "mqtt://localhost:1884"\nclient_id = "cam-1"\nsource = "front=camera://0"\ndata_dir = "data"\n'
        'stay = true\nthreads = 2\ndevice = "cuda"\ntls_ca = "ca.pem"\n'
    )
    settings = read_doctor_settings(config, {"device": "cpu", "fleet": None})
    assert settings.broker == "mqtt://localhost:1884"
    assert (settings.device, settings.fleet, settings.tls_ca) == ("cpu", "fleet", Path("ca.pem"))
    assert [camera.name for camera in settings.cameras()] == ["front"]
    assert settings.time_server() == ("localhost", 123)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "jetsen"}, "did you mean 'jetson'"),
        ({"require_provider": "tensor"}, "takes one of tensorrt, cuda, cpu"),
        ({"broker": "mqtt://example.org"}, "not encrypted"),
        ({"client_id": "cam 1"}, "client id"),
        ({"ntp": "time.example:x"}, "expected HOST or HOST:PORT"),
        ({"source": ["camra://0"]}, "camera"),
        ({"tls_ca": 3}, "--tls-ca is 3, expected a path"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_is_looked_at(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_doctor_settings(None, options)


def test_a_key_that_a_client_does_not_know_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "edge.toml"
    for line, message in (("brokr = 'x'", "did you mean 'broker'"), ("ntp = 'time.example'", "unknown key 'ntp'")):
        config.write_text(line)
        with pytest.raises(SettingsError, match=message):
            read_doctor_settings(config, {})


def test_a_time_server_is_whom_the_operator_names_else_the_brokers_host() -> None:
    assert DoctorSettings().time_server() is None
    assert DoctorSettings(ntp="time.example").time_server() == ("time.example", 123)
    assert DoctorSettings(ntp="time.example:1123").time_server() == ("time.example", 1123)
    assert DoctorSettings(ntp="2001:db8::1").time_server() == ("2001:db8::1", 123)


def test_there_is_one_check_for_each_camera_and_each_provider_and_all_are_bounded() -> None:
    every = checks(DoctorSettings(source=("front=camera://0", "rear=csi://1")))
    names = [check.name for check in every]
    assert {"source.front", "source.rear", "provider.tensorrt", "provider.cuda", "provider.cpu"} < set(names)
    assert len(set(names)) == len(names)
    assert all(0 < check.timeout_s <= 180 for check in every)


def test_every_row_that_the_sources_name_is_documented() -> None:
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    table = page.split("## What each row means", 1)[1]
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "edge_client/doctor").glob("*.py"))
    rows = set(re.findall(r'"((?:package|cameras|keys|broker|clock|disk)\.[a-z-]+)"', code))
    assert len(rows) > 15
    assert [row for row in sorted(rows) if f"`{row}`" not in table] == []
    assert all(f"`provider.{name}`" in table for name in REQUIRABLE)
