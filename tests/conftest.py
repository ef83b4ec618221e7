"""Settings for all tests: one thread per process, so that a busy machine slows tests down in proportion and no more.

Where PyTorch or ONNX aren't installed, as on a board, test modules that import them are left out, and say so.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
from collections.abc import Generator, Iterator

import pytest
from xdist.scheduler import LoadScopeScheduling, Scheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from replayfleet.federation.imports import without_collections
from replayfleet.federation.service.logs import FewLines
from replayfleet.federation.service.torch_setup import prepare_torch

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    prepare_torch(int(os.environ.get("TEST_THREADS", "1")))  # tests/environments.py asks for two, too


class TwoWithProcesses(LoadScopeScheduling):
    """Shares tests between workers (`make test`) by file, for its fixtures; two get all that start processes.

    These wait for most of their time, so two at a time keep a core busy; more would make each other late.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        apart = file.startswith(("tests/e2e/", "tests/faults/", "tests/integration/"))
        computes = file.startswith(("tests/e2e/test_deployed_", "tests/integration/test_export_"))  # in their process
        if not apart or computes:
            return file
        return "faults and clients" if "integration" not in file or "edge_client" in file else "fleets"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Let `-n auto` start one worker more than there are cores: those with processes wait for most of their time."""
    return (os.cpu_count() or 1) + 1


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    """Let xdist share tests as `TwoWithProcesses` does."""
    return TwoWithProcesses(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip test modules that need PyTorch or ONNX where these aren't installed."""
    report = yield
    for package in ("torch", "onnx"):
        if report.failed and str(report.longrepr).endswith(f"No module named '{package}'"):
            report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {package}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without looking for garbage, and let no later look go through it: each takes a second or two."""
    with without_collections():
        found = yield
    gc.collect()
    gc.freeze()
    return found


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo what commands that run inside a test do to this process's log, or the next test sees other lines."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in [handler for handler in root.handlers if type(handler) in {logging.StreamHandler, FewLines}]:
        root.removeHandler(handler)


@pytest.fixture
def served_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients' models answer in this process: for tests that ask nothing of the serving process."""
    from support.served_here import ServedHere

    monkeypatch.setattr("replayfleet.edge_client.serving.model.ServingProcess", ServedHere)
