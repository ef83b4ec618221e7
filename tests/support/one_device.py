"""A stand-in for a GPU: PyTorch's meta device, which computes nothing, and a check that no operation mixes devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MAY_MIX = ("aten.index.", "aten._to_copy.", "aten.copy_.")
"""A tensor on a GPU may be indexed by one on the CPU, and copied to and from it."""


class OneDevice(TorchDispatchMode):
    """Raises AssertionError where CUDA would: an operation gets tensors of two devices, scalars apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim > 0]
        devices = {tensor.device.type for tensor in tensors}
        assert len(devices) <= 1 or str(func).startswith(_MAY_MIX), f"{func} of tensors on {sorted(devices)}"
        return func(*args, **kwargs)


def on_meta(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in parameters.items()}
