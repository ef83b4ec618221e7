"""Where methods compute: which torch device, and moving their values there and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.records import Artefacts, RoundData

AUTO = "auto"
"""A GPU that computes what the CPU does, or the CPU."""
CPU = torch.device("cpu")


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
    """Return the device ``name``, as tensors on it call it: ``cuda`` is ``cuda:0``, which some of PyTorch insists on.

    Raises:
        SettingsError: PyTorch knows no such device, or this machine has none.
    """
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # PyTorch built without CUDA asserts
        raise _unusable(name, error) from error
    return device


def _unusable(name: str, error: Exception) -> SettingsError:
    first_line = str(error).strip().splitlines()[0]
    return SettingsError(f"torch device {name!r} can't be used ({first_line}); choose cpu, or a GPU")


def proved_device(name: str, candidates: Sequence[str] = ("cuda",)) -> tuple[torch.device, str]:
    """Return a device that computes what the CPU does, and in words why it isn't the one that was wished for.

    Args:
        name: of a device; ``auto`` for the first of ``candidates`` that proves itself, else the CPU.
        candidates: what ``auto`` tries.

    Raises:
        SettingsError: PyTorch knows no such device, or it can't be used, or computes something else.
    """
    if name != AUTO:
        device = torch_device(name)
        if device.type != "cpu":
            _prove(device)
        return device, ""
    reasons = []
    for candidate in candidates:
        try:
            device = torch_device(candidate)
            _prove(device)
        except SettingsError as error:  # noqa: PERF203
            reasons.append(str(error))
        else:
            return device, ""
    return CPU, "; ".join(reasons)


def _prove(device: torch.device) -> None:
    """Compare one step of a small network with the CPU's.

    Raises:
        SettingsError: It computes something else, or nothing.
    """
    try:
        mine, theirs = _step_on(device), _step_on(CPU)
    except (RuntimeError, AssertionError) as error:
        raise _unusable(device.type, error) from error
    if not all(torch.allclose(one, other, rtol=1e-2, atol=1e-3) for one, other in zip(mine, theirs, strict=True)):
        raise SettingsError(f"torch device {device.type!r} computes other numbers than the CPU; choose cpu")


def _step_on(device: torch.device) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    images = torch.rand(4, 3, 8, 8, generator=rng).to(device)
    kernel = (torch.rand(8, 3, 3, 3, generator=rng) / 9).to(device).requires_grad_()
    head = (torch.rand(8, 2, generator=rng) / 8).to(device).requires_grad_()
    maps = F.batch_norm(F.conv2d(images, kernel), None, None, training=True).relu()
    loss = F.cross_entropy(maps.mean(dim=(2, 3)) @ head, torch.tensor([0, 1, 1, 0], device=device))
    loss.backward()
    made = (loss.detach(), kernel.grad, head.grad)
    return [tensor.cpu() for tensor in made if tensor is not None]


def placed(value: Any, device: torch.device, moved: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Return a method's state, upload or download with all its tensors on ``device``; the value itself if they are.

    Args:
        value: a record.
        device: where to.
        moved: parameter sets that were looked at before, kept by the caller: what records share is moved once, and
            shared.
    """
    moved = {} if moved is None else moved
    artefacts = value.pack()
    sets = artefacts.parameter_sets
    for one in sets.values():
        if id(one) not in moved:
            is_there = all(tensor.device.type == device.type for tensor in one.values())
            moved[id(one)] = (one, one if is_there else {key: tensor.to(device) for key, tensor in one.items()})
    if all(moved[id(one)][1] is one for one in sets.values()):
        return value
    return type(value).unpack(Artefacts({name: moved[id(one)][1] for name, one in sets.items()}, artefacts.facts))


def placed_data(data: RoundData, device: torch.device) -> RoundData:
    """Return round data on ``device``."""
    return data if device.type == "cpu" else RoundData(data.images.to(device), data.labels.to(device))
