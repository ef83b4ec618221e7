"""A device that isn't there: tensors that claim to be on it compute on the CPU, and refuse what a GPU would refuse.

``with virtual_device():`` whatever is made on ``DEVICE`` or moved to it computes the CPU's bits; an operation on
tensors of both devices, a generator of the wrong one, and NumPy's look at its memory raise what CUDA raises. PyTorch's
lazy device has no kernels in its wheels and runs backward passes on the calling thread, as a tensor subclass needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

NAME = "lazy"
DEVICE = torch.device(NAME)
_TAKES_FROM_THE_CPU = ("aten.index.", "aten.index_put_.", "aten._to_copy.", "aten.copy_.")
"""A tensor on a GPU may be indexed by one on the CPU, and copied to and from it."""
_GIVES_NUMBERS = ("aten._local_scalar_dense.", "aten.equal.")


class _There(Tensor):
    """A tensor on the device; its memory is ``inner``, on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls: type[_There], inner: Tensor) -> _There:
        made: _There = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)


class _Compute(TorchDispatchMode):
    """Operations that have no tensor on the device yet: those that make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Make(TorchFunctionMode):
    """Functions that look into memory before any operation is asked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in {torch.tensor, torch.as_tensor, torch.asarray} and _is_there(kwargs.get("device")):
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        if func is Tensor.new_tensor and type(args[0]) is _There:
            return torch.tensor(args[1], **{"dtype": args[0].dtype} | kwargs).to(DEVICE)
        if func is Tensor.tolist and type(args[0]) is _There:
            return args[0].cpu().tolist()
        if func in {Tensor.__getitem__, Tensor.__setitem__} and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1]), *args[2:])
        return func(*args, **kwargs)


@contextmanager
def virtual_device() -> Iterator[None]:
    """While it lasts, this thread has the device. A module that is moved gets new parameters: ``data`` can't be set."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _Make(), _Compute():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device) == DEVICE


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, aliases, writes = _known(func)
    tensors: list[Tensor] = []
    inside = [_inner(value, tensors) for value in args]
    named = {key: _inner(value, tensors) for key, value in kwargs.items()}
    places = {type(tensor) is _There for tensor in tensors if tensor.ndim > 0}
    if len(places) > 1 and not name.startswith(_TAKES_FROM_THE_CPU):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cpu and {NAME}")
    there = _result_is_there(name, args, kwargs, tensors)
    if there and kwargs.get("generator") is not None:
        raise RuntimeError(f"{name}: expected a {NAME} device type for generator but found cpu")
    if _is_there(kwargs.get("device")):
        named["device"] = "cpu"
    result = func(*inside, **named)
    if not there:
        return result
    if writes:
        return args[0]
    result = _outer(result)
    return return_and_correct_aliasing(func, args, kwargs, result) if aliases else result


@functools.cache
def _known(func: Any) -> tuple[str, bool, bool]:
    """Return an operation's name, and whether it has to do with aliases, and writes numbers into its first argument.

    An alias is an argument that it writes into, or returns a view of.
    """
    arguments, returns = func._schema.arguments, func._schema.returns
    aliases = any(each.alias_info is not None for each in (*arguments, *returns))
    written = [each.alias_info is not None and each.alias_info.is_write for each in (*arguments[:1], *returns)]
    return str(func), aliases, written == [True, True] and torch.Tag.inplace_view not in func.tags


def _inner(value: Any, tensors: list[Tensor]) -> Any:
    """Return what lies behind a value, or all of a list; note its tensors. Operations take nothing deeper."""
    if isinstance(value, (list, tuple)):
        return type(value)([_inner(each, tensors) for each in value])
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.inner if type(value) is _There else value
    return value


def _outer(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_outer(each) for each in value])
    return _There(value) if isinstance(value, Tensor) and type(value) is not _There else value


def _result_is_there(name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
    if name.startswith(_GIVES_NUMBERS):
        return False
    if kwargs.get("device") is not None:
        return _is_there(kwargs["device"])
    if name.startswith(_TAKES_FROM_THE_CPU):
        return type(args[0]) is _There
    return any(type(tensor) is _There for tensor in tensors)
