"""What a device asks of a GPU's driver; PyTorch's own check of it needs none. A stand-in: on a GPU the tests of
``test_on_a_gpu.py`` run too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.cuda._utils import _get_device_index

from replayfleet.edge_client.learning.training.trainer import _bound_on
from replayfleet.federation.methods.kit.placement import torch_device


def test_a_gpu_s_memory_is_bounded_by_the_number_that_pytorch_insists_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, float] = {}

    def bound(share: float, device: torch.device) -> None:
        asked[_get_device_index(device)] = share  # as set_per_process_memory_fraction looks at it

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", bound)
    with pytest.raises(ValueError, match="specified index"):
        _bound_on(torch.device("cuda"))(2 << 30)
    monkeypatch.setattr(torch, "empty", lambda *_, device: SimpleNamespace(device=torch.device(device.type, 0)))
    _bound_on(torch_device("cuda"))(2 << 30)
    assert asked == {0: 0.25}
