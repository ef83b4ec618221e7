"""One member of a real fleet sends what breaks it, and the aggregator is killed in the middle: the rounds go on."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.tiny_fleet import FLEET, TinyClient

from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.service.artefact_codec import decode_artefacts
from replayfleet.federation.wire.transport.broker import find_mosquitto, open_broker
from tests.support.mosquitto import Mqtt

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="needs mosquitto")

LIMIT_S = 240.0
PROGRAM = "from replayfleet.aggregator.cli import main; main()"


class Member(TinyClient):
    """Uploads the average model with a little noise, or scaled until export and arithmetic fail."""

    scale = 1.0

    def _train(self, now: float) -> None:
        said, manifest = self.announcement, self.manifest
        if said is None or manifest is None or said.state != "open" or not manifest.round == said.round > self.uploaded:
            return
        self.uploaded = said.round
        blobs = [entry for entry in manifest.blobs if not entry.name.startswith("graph/")]
        start = TaskDownload.unpack(decode_artefacts(blobs, manifest.facts, self.blobs)).task_parameters
        rng = torch.Generator().manual_seed(said.round)
        trained = {
            key: tensor * self.scale * (1 + 0.01 * torch.randn(tensor.shape, generator=rng))
            if tensor.is_floating_point()
            else tensor
            for key, tensor in start.items()
        }
        self.send(TaskUpload(trained, 10).pack(), said.round, now)


def aggregator(url: str, folder: Path) -> subprocess.Popen[bytes]:
    options = ["--clients", "3", "--rounds", "3", "--method", "fedavg", "--settings", "tiny", "--deadline-s", "60"]
    command = [sys.executable, "-c", PROGRAM, "serve", "--broker", url, "--fleet", FLEET]
    with (folder.parent / "log").open("ab") as log:
        return subprocess.Popen([*command, "--data-dir", str(folder), *options], stderr=log)


def test_rounds_close_without_it_and_it_is_told(tmp_path: Path):
    folder = tmp_path / "aggregator"
    with open_broker(log=logging.getLogger("test")) as broker:
        members = [Member(Mqtt(broker.url), f"cam-{number}", tmp_path / f"cam-{number}") for number in (1, 2, 3)]
        members[1].scale = 1e4
        process, killed, end = aggregator(broker.url, folder), False, time.monotonic() + LIMIT_S
        try:
            while process.poll() is None:
                assert time.monotonic() < end, "three rounds never ended"
                for member in members:
                    member.pump(time.monotonic())
                if not killed and any(member.uploaded == 1 for member in members):
                    process.kill()
                    process.wait()
                    process, killed = aggregator(broker.url, folder), True
                time.sleep(0.01)
        finally:
            process.kill()
            for member in members:
                member.session.stop()
    assert killed
    assert process.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    left_out = {
        (entry["round"], entry["client"]) for entry in read_journal(folder) if entry["event"] == "upload quarantined"
    }
    assert left_out == {(0, "cam-2"), (1, "cam-2"), (2, "cam-2")}
    assert "is plausible" in members[1].manifest.notice
    assert members[0].manifest.notice == ""
    status = [sys.executable, "-c", PROGRAM, "status", "--data-dir", str(folder), "--json"]
    shown = json.loads(subprocess.run(status, check=True, capture_output=True).stdout)
    assert [client["quarantined_round"] for client in shown["clients"]] == [-1, 2, -1]
