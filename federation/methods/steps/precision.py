"""What convolutions compute in while a task model trains: float32 or bfloat16, on processors without it too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

PRECISIONS = ("float32", "bfloat16")
"""What convolutions compute in while the task model trains; parameters, statistics and updates stay float32."""

_ROUNDED = frozenset({F.conv2d, F.linear})


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which convolutions compute in ``precision``, one of ``PRECISIONS``."""
    if precision == "float32":
        return nullcontext()
    if device.type == "cpu" and not _multiplies_bfloat16():
        return rounding_to_bfloat16()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextmanager
def rounding_to_bfloat16() -> Iterator[None]:
    """As autocast to bfloat16 on a CPU, but of rounded numbers in float32, whose sums are rounded again.

    That is what a processor with bfloat16 does. On one without it, training takes about as long as in float32 this
    way, and many times as long by PyTorch's own kernels.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16), _Rounding():
        yield


class _Rounding(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _ROUNDED:
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            rounded = function(*map(_rounded, args), **{name: _rounded(value) for name, value in kwargs.items()})
        return rounded.bfloat16()


def _rounded(value: Any) -> Any:
    """Return a tensor's numbers as bfloat16 has them, in float32, and anything else as it is."""
    return value.bfloat16().float() if isinstance(value, Tensor) else value


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Return whether PyTorch has fast kernels of bfloat16 for this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
