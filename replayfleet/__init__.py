"""Replayfleet: cameras that keep learning.

What is listed here is the public interface, explained with examples in ``docs/api.md``; it is imported when it is used,
so that ``import replayfleet`` loads neither torch nor NumPy.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayfleet.edge_client.cameras.kinds import CameraKind
    from replayfleet.edge_client.flow import Boxes, CameraError, Picture
    from replayfleet.export.parameters import Model
    from replayfleet.federation.errors import ReplayfleetError, SettingsError
    from replayfleet.federation.methods.task_method import TaskMethod
    from replayfleet.federation.streams.datasets import DatasetKind
    from replayfleet.federation.streams.labelled_images import LabelledImages
    from replayfleet.models.specs import DetectionSpec, TaskSpec
    from replayfleet.runs import Run, as_network, export_model, open_run, simulate

_HOMES = {
    "Boxes": "edge_client.flow",
    "CameraError": "edge_client.flow",
    "CameraKind": "edge_client.cameras.kinds",
    "DatasetKind": "federation.streams.datasets",
    "DetectionSpec": "models.specs",
    "LabelledImages": "federation.streams.labelled_images",
    "Model": "export.parameters",
    "Picture": "edge_client.flow",
    "ReplayfleetError": "federation.errors",
    "Run": "runs",
    "SettingsError": "federation.errors",
    "TaskMethod": "federation.methods.task_method",
    "TaskSpec": "models.specs",
    "as_network": "runs",
    "export_model": "runs",
    "open_run": "runs",
    "simulate": "runs",
}

__all__ = [
    "Boxes",
    "CameraError",
    "CameraKind",
    "DatasetKind",
    "DetectionSpec",
    "LabelledImages",
    "Model",
    "Picture",
    "ReplayfleetError",
    "Run",
    "SettingsError",
    "TaskMethod",
    "TaskSpec",
    "as_network",
    "export_model",
    "open_run",
    "simulate",
]

for _name, _value in {"ORT_DISABLE_TELEMETRY": "1", "RAY_USAGE_STATS_ENABLED": "0", "DO_NOT_TRACK": "true"}.items():
    # ONNX Runtime (from 1.29 on), Ray and MLflow else tell their makers of each machine and of the models on it.
    os.environ.setdefault(_name, _value)


def __getattr__(name: str) -> Any:
    """Import a public name on its first use (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        return version("replayfleet")
    if name not in _HOMES:
        raise AttributeError(f"module 'replayfleet' has no attribute {name!r}")
    return getattr(importlib.import_module(f"replayfleet.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
