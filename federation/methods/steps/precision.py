"""What convolutions compute in while a task model trains: float32 or bfloat16, on processors without it too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

PRECISIONS = ("float32", "bfloat16")
"""What convolutions compute in while the task model trains; parameters, statistics and updates stay float32."""

_ROUNDED = frozenset(
    (F.conv2d, F.conv_transpose2d, F.linear, torch.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)
)
"""What task models multiply with, ours and packages'; a name that is missing here is slow, and no less right."""

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))


def computing_in(precision: str, device: torch.device, *, vmapped: bool = False) -> AbstractContextManager[object]:
    """Return the context in which convolutions compute in ``precision``, one of ``PRECISIONS``.

    ``vmapped``: it is entered within ``torch.vmap``, where autocast alone leaves convolutions in float32.
    """
    if precision == "float32":
        return nullcontext()
    if device.type == "cpu" and not _multiplies_bfloat16():
        return rounding_to_bfloat16(device.type, torch.float32)
    if vmapped:
        return rounding_to_bfloat16(device.type, torch.bfloat16)
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextmanager
def rounding_to_bfloat16(device_type: str, multiplied_in: torch.dtype) -> Iterator[None]:
    """As autocast to bfloat16, but rounded numbers are multiplied in ``multiplied_in``; sums are rounded again.

    In float32 that is what a processor with bfloat16 does. On one without it, training takes 1.2 times as long
    as in float32 this way, and twelve times by PyTorch's own kernels (``results/bfloat16``).
    """
    with torch.autocast(device_type, dtype=torch.bfloat16), _Rounding(device_type, multiplied_in):
        yield


class _Rounding(TorchFunctionMode):
    def __init__(self, device_type: str, multiplied_in: torch.dtype) -> None:
        super().__init__()
        self._device_type, self._multiplied_in = device_type, multiplied_in

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _ROUNDED or "out" in kwargs or not _are_floats((*args, *kwargs.values())):
            return function(*args, **kwargs)
        with torch.autocast(self._device_type, enabled=False):
            sums = function(*map(self._rounded, args), **{name: self._rounded(one) for name, one in kwargs.items()})
        return sums.bfloat16()

    def _rounded(self, value: Any) -> Any:
        """Return a tensor's numbers as bfloat16 has them, and anything else as it is."""
        return value.bfloat16().to(self._multiplied_in) if isinstance(value, Tensor) else value


def _are_floats(values: Iterable[object]) -> bool:
    """Whether autocast takes all tensors among these; it leaves integers, complex numbers and float64 as they are."""
    return all(value.dtype in _FLOATS for value in values if isinstance(value, Tensor))


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Return whether PyTorch has fast kernels of bfloat16 for this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
