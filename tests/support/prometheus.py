"""A real Prometheus with our settings and rules."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.waiting import until

FOLDER = Path(__file__).parents[2] / "scripts" / "monitoring"
PATIENCE_S = 60.0


class Prometheus:
    """A Prometheus that scrapes ``target`` every 0.2 s and waits for nothing before it alerts; a context.

    Args:
        folder: its own.
        target: HOST:PORT.
        token: that the target wants to see.
    """

    def __init__(self, folder: Path, target: str, token: str) -> None:
        alerts = (FOLDER / "alerts.yaml").read_text(encoding="utf-8")
        (folder / "alerts.yaml").write_text(re.sub(r"\n +for: \w+", "", alerts))
        (folder / "token").write_text(token)
        text = (FOLDER / "prometheus.yaml").read_text(encoding="utf-8").replace("15s", "200ms")
        text = text.replace("/etc/prometheus/token", str(folder / "token")).replace("aggregator:19110", target)
        (folder / "prometheus.yaml").write_text(text)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._command = [
            "prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]  # fmt: skip

    def __enter__(self) -> Prometheus:
        self._process = subprocess.Popen(self._command)
        return self

    def __exit__(self, *what: object) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, path: str) -> Any:
        assert self._process.poll() is None, "Prometheus ended"
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None  # it begins

    def wait(self, query: str) -> None:
        until(lambda: (self.ask(f"query?query={urllib.parse.quote(query)}") or {}).get("result"), PATIENCE_S)

    def firing(self) -> set[str]:
        found = self.ask("alerts") or {"alerts": []}
        return {alert["labels"]["alertname"] for alert in found["alerts"] if alert["state"] == "firing"}

    def until_firing(self, names: set[str]) -> None:
        until(lambda: names <= self.firing(), PATIENCE_S, lambda: names - self.firing())
