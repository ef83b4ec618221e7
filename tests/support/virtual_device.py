"""A device that isn't there: tensors that claim to be on it compute on the CPU, and refuse what a GPU would refuse.

``with virtual_device():`` whatever is made on ``DEVICE`` or moved to it computes the CPU's bits; an operation on
tensors of both devices, a generator of the wrong one, and NumPy's look at its memory raise what CUDA raises. PyTorch's
lazy device has no kernels in its wheels and runs backward passes on the calling thread, as a tensor subclass needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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
        if func is Tensor.new_tensor and isinstance(args[0], _There):
            return torch.tensor(args[1], **{"dtype": args[0].dtype} | kwargs).to(DEVICE)
        if func is Tensor.tolist and isinstance(args[0], _There):
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
    name, aliases = _known(func)
    tensors = [each for each in _flat((*args, *kwargs.values())) if isinstance(each, Tensor)]
    places = {isinstance(tensor, _There) for tensor in tensors if tensor.ndim > 0}
    if len(places) > 1 and not name.startswith(_TAKES_FROM_THE_CPU):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cpu and {NAME}")
    there = _result_is_there(name, args, kwargs, tensors)
    if there and kwargs.get("generator") is not None:
        raise RuntimeError(f"{name}: expected a {NAME} device type for generator but found cpu")
    inside = {key: "cpu" if key == "device" and _is_there(value) else value for key, value in kwargs.items()}
    result = func(*_each(_inner, args), **{key: _each(_inner, value) for key, value in inside.items()})
    if not there:
        return result
    result = _each(_outer, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if aliases else result


@functools.cache
def _known(func: Any) -> tuple[str, bool]:
    """Return an operation's name, and whether it writes into an argument or returns a view of one."""
    return str(func), any(each.alias_info is not None for each in (*func._schema.arguments, *func._schema.returns))


def _flat(values: Any) -> Iterator[Any]:
    """Go through what lies in values, and in lists and tuples of them: operations take nothing deeper."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a value changed; of a list or tuple everything in it."""
    if isinstance(value, (list, tuple)):
        return type(value)([_each(change, each) for each in value])
    return change(value)


def _result_is_there(name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
    if name.startswith(_GIVES_NUMBERS):
        return False
    if kwargs.get("device") is not None:
        return _is_there(kwargs["device"])
    if name.startswith(_TAKES_FROM_THE_CPU):
        return isinstance(args[0], _There)
    return any(isinstance(tensor, _There) for tensor in tensors)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, _There) else value


def _outer(value: Any) -> Any:
    return _There(value) if isinstance(value, Tensor) and not isinstance(value, _There) else value
