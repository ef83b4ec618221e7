"""What compose.yaml starts, as processes of this machine: its broker, its aggregator and its Prometheus, as it says.

Images can't be had here, so Grafana is left to ``test_alerts``, which holds its dashboard against the metrics.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from replayfleet.aggregator.cli import cli
from replayfleet.federation.children import child_command, child_environment
from replayfleet.federation.wire.transport.broker import find_mosquitto
from tests.support.ports import free_port
from tests.support.prometheus import Prometheus

yaml = pytest.importorskip("yaml")
SCRIPTS = Path(__file__).parents[2] / "scripts"
TOKEN = "0123456789abcdef0123456789abcdef"
TASK = 'image_channels = 1\nimage_size = 28\nclass_names = ["a", "b"]\ngenerator_width = 1\n'


class Machine:
    """A folder as ``replayfleet init`` makes it; what a service mounts lies where its container would see it."""

    def __init__(self, folder: Path) -> None:
        for name in ("docker", "monitoring"):
            shutil.copytree(SCRIPTS / name, folder / name)
        self._folder = folder
        self._compose = yaml.safe_load((folder / "docker" / "compose.yaml").read_text(encoding="utf-8"))
        self.ports = {port: free_port() for port in ("8883", "19100", "19110")}

    def service(self, name: str) -> dict[str, Any]:
        return dict(self._compose["services"][name])

    def seen_by(self, name: str, path: str) -> Path:
        """Where on this machine lies what a service sees at ``path``."""
        place, target = max(self._mounts(name), key=lambda mount: len(mount[1]) * path.startswith(mount[1]))
        assert path.startswith(target), f"{name} has no {path}"
        return Path(str(place) + path.removeprefix(target))

    def told(self, name: str, text: str) -> str:
        """Return a text with a service's paths, hosts and ports as they are on this machine."""
        for place, target in sorted(self._mounts(name), key=lambda mount: -len(mount[1])):
            text = text.replace(target, str(place))
        for port, here in self.ports.items():
            text = text.replace(port, str(here))
        return text.replace("0.0.0.0", "127.0.0.1").replace("//broker:", "//localhost:")

    def _mounts(self, name: str) -> list[tuple[Path, str]]:
        found = []
        for volume in self.service(name)["volumes"]:
            source, target = volume.split(":")[:2]
            is_named = source in self._compose["volumes"]
            place = self._folder / "volumes" / source if is_named else self._folder / "docker" / source
            found.append((Path(os.path.normpath(place)), target))
        return found


@pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed (apt install prometheus)")
@pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto on this machine")
def test_broker_aggregator_and_prometheus_work_together_as_the_file_says(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    data_dir = machine.seen_by("aggregator", "/var/lib/replayfleet")
    enrolled = CliRunner().invoke(
        cli, ["enroll", "cam-1", "--data-dir", str(data_dir), "--host", "localhost", "--host", "broker"]
    )
    assert enrolled.exit_code == 0, enrolled.output
    shutil.copytree(data_dir / "broker", tmp_path / "docker" / "broker")
    conf = machine.seen_by("broker", "/etc/mosquitto/replayfleet/replayfleet.conf")
    conf.write_text(machine.told("broker", conf.read_text()) + ("user root\n" if os.geteuid() == 0 else ""))
    task = tmp_path / "task.toml"
    task.write_text(TASK)
    settings = (SCRIPTS / "systemd" / "aggregator.toml").read_text()
    for pattern, new in (
        ('broker = "[^"]*"', 'broker = "mqtts://broker:8883"'),
        ('identity = "[^"]*"', 'identity = "/var/lib/replayfleet/identity"'),
        ('dataset = "[^"]*"', f'task = "{task}"'),
        ('settings = "small"', 'settings = "tiny"'),
        ("health_port = .*", ""),
    ):
        settings, count = re.subn(pattern, new, settings)
        assert count == 1, pattern
    (tmp_path / "docker" / "aggregator.toml").write_text(machine.told("aggregator", settings))
    token = tmp_path / "docker" / "metrics-token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    words = [machine.told("aggregator", word) for word in machine.service("aggregator")["command"]]
    mosquitto = [machine.told("broker", word) for word in machine.service("broker")["command"].split()]
    check = machine.service("aggregator")["healthcheck"]["test"][3]
    with (
        subprocess.Popen([str(find_mosquitto()), *mosquitto[1:]]) as broker,
        subprocess.Popen(child_command("replayfleet.aggregator.cli", *words), env=child_environment()) as aggregator,
    ):
        try:
            with Prometheus(tmp_path, f"127.0.0.1:{machine.ports['19110']}", TOKEN) as seen:
                seen.wait("replayfleet_broker_connected > 0")
                seen.wait('replayfleet_certificate_end_timestamp_seconds{member="cam-1"}')
                seen.wait("replayfleet_members > 0")
                until = time.monotonic() + 60
                while subprocess.run([sys.executable, "-c", machine.told("aggregator", check)], check=False).returncode:
                    assert aggregator.poll() is None
                    assert time.monotonic() < until
                assert (machine.seen_by("prometheus", "/etc/prometheus/token")).read_text() == TOKEN
                assert machine.seen_by("prometheus", "/etc/prometheus/alerts.yaml").is_file()
        finally:
            for process in (aggregator, broker):
                process.terminate()
    assert aggregator.returncode == 0


def test_grafana_finds_its_source_and_its_dashboard(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for kind in ("datasources", "dashboards"):
        path = machine.seen_by("grafana", f"/etc/grafana/provisioning/{kind}/replayfleet.yaml")
        said = yaml.safe_load(path.read_text())
    port = machine.service("prometheus").get("command", "9090")
    assert said["datasources"][0]["url"] == f"http://prometheus:{port}"
    folder = machine.seen_by("grafana", said["providers"][0]["options"]["path"] + "/replayfleet.json")
    assert folder.is_file()
