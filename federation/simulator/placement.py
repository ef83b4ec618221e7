"""Moving a method's values to the torch device that a simulation computes on."""

from __future__ import annotations

from typing import Any

import torch

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.records import Artefacts, RoundData


def device_type(name: str) -> str:
    """Return what kind of device ``name`` is: ``cuda`` for ``cuda:1``. This machine may have none of it.

    Raises:
        SettingsError: PyTorch knows no such device.
    """
    try:
        return torch.device(name).type
    except RuntimeError as error:
        raise _unusable(name, error) from error


def torch_device(name: str) -> torch.device:
    """Return the device ``name``.

    Raises:
        SettingsError: PyTorch knows no such device, or this machine has none.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # PyTorch built without CUDA asserts
        raise _unusable(name, error) from error
    return device


def _unusable(name: str, error: Exception) -> SettingsError:
    first_line = str(error).strip().splitlines()[0]
    return SettingsError(f"torch device {name!r} can't be used ({first_line}); choose cpu, or a GPU")


def placed(value: Any, device: torch.device) -> Any:
    """Return a method's state, upload or download with all its tensors on ``device``; the value itself on the CPU."""
    if device.type == "cpu":
        return value
    artefacts = value.pack()
    moved = {
        name: {key: tensor.to(device) for key, tensor in parameters.items()}
        for name, parameters in artefacts.parameter_sets.items()
    }
    return type(value).unpack(Artefacts(moved, artefacts.facts))


def placed_data(data: RoundData, device: torch.device) -> RoundData:
    """Return round data on ``device``."""
    return data if device.type == "cpu" else RoundData(data.images.to(device), data.labels.to(device))
