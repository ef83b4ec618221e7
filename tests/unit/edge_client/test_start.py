"""What a board's profile becomes in a running client; the boards are files of the test, what was proved is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import board_trees as trees

from replayfleet.devices.probing import Board, fitting, probe
from replayfleet.devices.profiles import CPU, CUDA, GIB, TENSORRT, profile
from replayfleet.devices.providers import ProviderProof
from replayfleet.edge_client.serving.engine_desk import no_engines, open_desk
from replayfleet.edge_client.settings import ClientSettings
from replayfleet.edge_client.start import _check_identity, _identity, _proved
from replayfleet.federation.service.credentials.identity import CA, CERTIFICATE, KEY
from replayfleet.federation.service.credentials.keys import ROOT, SIGNING_KEY

SETTINGS = ClientSettings(
    broker="mqtt://127.0.0.1:1", client_id="cam-1", source="synthetic://", data_dir=Path("data"), device="auto"
)


@pytest.fixture
def orin_nx(tmp_path: Path) -> Board:
    return probe(trees.board_tree(tmp_path, trees.ORIN_NX, cores="0-7", memory_kib=16 << 20), "aarch64")


def test_a_profile_says_threads_memory_and_providers(orin_nx: Board) -> None:
    compute = _identity(SETTINGS, fitting(orin_nx), ProviderProof(CUDA), orin_nx).compute
    assert compute.providers == (CUDA, CPU)
    assert (compute.inference_threads, compute.training_threads) == (2, 4)
    assert compute.allowance.memory_bytes == 8 * GIB
    nano = _identity(SETTINGS, profile("jetson-orin-nano"), ProviderProof(CUDA), orin_nx).compute
    assert nano.allowance.memory_bytes == 2 * GIB
    arm = _identity(SETTINGS, profile("arm-cpu"), ProviderProof(CPU), orin_nx).compute
    assert arm.allowance.max_temperature_c == 75.0
    assert arm.providers == (CPU,)


def test_what_the_operator_wrote_wins(orin_nx: Board) -> None:
    wanted = replace(SETTINGS, threads=1, training_memory_mb=500, max_temperature_c=60.0, max_power_w=12.0)
    compute = _identity(wanted, fitting(orin_nx), ProviderProof(CUDA), orin_nx).compute
    assert compute.training_threads == 1
    assert compute.allowance.memory_bytes == 500 << 20
    assert (compute.allowance.max_temperature_c, compute.allowance.max_power_w) == (60.0, 12.0)


@pytest.mark.parametrize(
    ("device", "proved", "asked", "precision"),
    [
        ("jetson-orin-nx", CUDA, "auto", "fp16"),
        ("jetson-orin-nx", TENSORRT, "auto", "fp16"),
        ("jetson-orin-nx", CPU, "auto", "fp32"),  # no GPU that works: float16 would only be slower
        ("jetson-orin-nx", CUDA, "fp32", "fp32"),
        ("cpu", CPU, "auto", "fp32"),
        ("cpu", CPU, "int8", "int8"),
    ],
)
def test_the_fleet_is_asked_for_what_serves_quickest_or_for_what_the_operator_wrote(
    device: str, proved: str, asked: str, precision: str, orin_nx: Board
) -> None:
    wanted = replace(SETTINGS, precision=asked)
    assert _identity(wanted, profile(device), ProviderProof(proved), orin_nx).compute.precision == precision


@pytest.mark.parametrize(
    ("device", "proved", "engines"),
    [
        ("jetson-orin-nx", CUDA, True),
        ("jetson-orin-nx", CPU, False),  # no GPU that works: nothing to build an engine for
        ("jetson-orin-nano", CUDA, False),  # its memory is what serving needs
        ("jetson-orin-nano", TENSORRT, True),  # --require-provider tensorrt
        ("cuda", CUDA, True),
        ("cpu", CPU, False),
    ],
)
def test_engines_are_built_where_they_are_worth_it_or_asked_for(
    device: str, proved: str, engines: bool, orin_nx: Board
) -> None:
    compute = _identity(SETTINGS, profile(device), ProviderProof(proved), orin_nx).compute
    assert compute.open_engines is (open_desk if engines else no_engines)
    assert compute.providers[0] == (CPU if proved == CPU else CUDA), "TensorRT serves once its engine is built"


def test_auto_is_the_board_that_is_there_and_its_provider_is_proved() -> None:
    board = probe()
    found, proof = _proved(replace(SETTINGS, require_provider="cpu"), board)
    assert (found, proof.provider) == (fitting(board), CPU)


def test_what_lacks_in_an_identity_folder_is_said_before_it_is_made_or_trusted_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (CA, CERTIFICATE, KEY):
        (tmp_path / name).touch()
    settings = replace(SETTINGS, identity=tmp_path)
    _check_identity(settings)
    assert caplog.messages == ["no root in the identity folder", "no signing key in the identity folder"]
    for name in (ROOT, SIGNING_KEY):
        (tmp_path / name).touch()
    caplog.clear()
    _check_identity(settings)
    assert not caplog.messages
