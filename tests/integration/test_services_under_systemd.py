"""Both services as systemd starts them, a socket standing in for it: a process, its watchdog, SIGTERM."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.manager_socket import ManagerSocket

from replayfleet.federation.wire.transport.broker import find_mosquitto, open_broker

WITHIN_S = 120.0
"""A few seconds on a quiet machine; the aggregator exports its models first."""
WATCHDOG_US = 2_000_000

TASK = 'image_channels = 1\nimage_size = 28\nclass_names = ["dark", "bright"]\n'
CLIENT = ("start", "--client-id", "cam-1", "--source", "synthetic://street?rate=2", "--health-port", "-1")
AGGREGATOR = (
    *("serve", "--clients", "1", "--method", "fedavg", "--settings", "tiny", "--task", "task.toml", "--threads", "1"),
    *("--health-port", "-1"),
)


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    if find_mosquitto() is None:
        pytest.skip("no mosquitto on this machine")
    with open_broker(log=logging.getLogger(__name__)) as found:
        yield found.url


@pytest.mark.parametrize(
    ("module", "words", "begins"),
    [
        ("replayfleet.edge_client.cli", CLIENT, "proving the execution provider"),
        ("replayfleet.aggregator.cli", AGGREGATOR, "building the fleet's models"),
    ],
)
def test_a_service_says_what_it_does_that_it_is_ready_and_that_it_turns(
    module: str, words: tuple[str, ...], begins: str, broker: str, tmp_path: Path
) -> None:
    (tmp_path / "task.toml").write_text(TASK)
    code = f"from {module} import main; main()"
    with ManagerSocket(str(tmp_path / "notify")) as systemd, (tmp_path / "log").open("wb") as log:
        environment = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": str(WATCHDOG_US)}
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words, "--broker", broker, "--data-dir", "data"],
            cwd=tmp_path,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=log,
            stderr=log,
        )
        heard: list[str] = []

        def hears(line: str) -> bool:
            deadline = time.monotonic() + WITHIN_S
            while line not in heard and time.monotonic() < deadline:
                time.sleep(0.02)
                heard.extend(line for message in systemd.read() for line in message.splitlines())
            return line in heard

        try:
            for line in (f"STATUS={begins}", "READY=1", "WATCHDOG=1"):
                assert hears(line), (line, heard, (tmp_path / "log").read_text())
            process.send_signal(signal.SIGTERM)
            assert hears("STOPPING=1")
            assert process.wait(WITHIN_S) == 0
            assert heard.index("READY=1") < heard.index("WATCHDOG=1") < heard.index("STOPPING=1")
        finally:
            process.kill()
            process.wait()
