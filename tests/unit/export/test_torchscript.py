"""TorchScript is loaded by digest only, and says nothing about the machine that made it."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import replayfleet.export.torchscript
from replayfleet.export.torchscript import load_torchscript, torchscript_bytes, torchscript_facts
from replayfleet.federation.errors import ArtefactRejected, Reason


def export_small() -> tuple[nn.Module, bytes, str]:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module[1].running_mean.fill_(0.5)
    data = torchscript_bytes(module, (3,), {"kind": "task"})
    return module, data, hashlib.sha256(data).hexdigest()


def test_an_exported_model_computes_the_same_at_any_batch_size():
    module, data, digest = export_small()
    loaded = load_torchscript(data, digest)
    for batch_size in (1, 2, 5):
        x = torch.full((batch_size, 3), 0.3)
        assert torch.equal(loaded(x), module(x))


def test_bytes_with_another_digest_never_reach_the_loader(monkeypatch: pytest.MonkeyPatch):
    _, data, digest = export_small()

    monkeypatch.setattr(torch.jit, "load", Mock(side_effect=AssertionError("loaded")))
    with pytest.raises(ArtefactRejected) as caught:
        load_torchscript(data + b"\0", digest)
    assert caught.value.reason is Reason.WRONG_DIGEST


def test_bytes_that_are_no_torchscript_are_refused_in_one_line():
    data = b"PK\x03\x04"
    with pytest.raises(ArtefactRejected, match="load-failed") as caught:
        load_torchscript(data, hashlib.sha256(data).hexdigest())
    assert "\n" not in str(caught.value)


def test_an_archive_with_a_password_is_no_export():
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("m/extra/replayfleet.kind", "task")
    locked = bytearray(archive.getvalue())
    locked[6] |= 1  # the flags of the one entry, before it and in the list at the end
    locked[locked.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(ArtefactRejected, match="is encrypted"):
        torchscript_facts(bytes(locked))


def test_the_file_holds_its_facts_and_no_source_paths():
    _, data, _ = export_small()
    here = str(Path(replayfleet.export.torchscript.__file__).parent).encode()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    assert contents["archive/extra/replayfleet.kind"] == b"task"
    assert not any(here in content or b"site-packages" in content for content in contents.values())


def test_the_bytes_do_not_depend_on_where_this_package_lies(tmp_path: Path):
    here = Path(replayfleet.__file__).parents[1]
    shutil.copytree(here / "replayfleet", tmp_path / "replayfleet", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import hashlib, torch, replayfleet.export.torchscript as made\n"
        "module = torch.nn.Linear(3, 2)\n"
        "[torch.nn.init.ones_(tensor) for tensor in module.parameters()]\n"
        "print(made.__file__, hashlib.sha256(made.torchscript_bytes(module, (3,), {})).hexdigest())"
    )
    answers = []
    for folder in (here, tmp_path):
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=folder, env=environment
        )
        answers.append(done.stdout.split())
    assert answers[0][0] != answers[1][0]
    assert answers[0][1] == answers[1][1]
