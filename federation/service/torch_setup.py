"""How every process of the fleet runs PyTorch: bounded threads that sleep when idle, no denormals."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Iterator
from typing import Any


def let_idle_threads_sleep() -> None:
    """Keep OpenMP's idle threads from spinning; call it before torch is imported, later it does nothing.

    Spinning threads keep others from the cores that they wait for: two threads on two cores that something else uses
    take a hundred times as long. An operator's own OMP_WAIT_POLICY stays. Bits don't depend on it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def prepare_torch(num_threads: int) -> None:
    """Bound PyTorch's threads and flush denormals to zero, in this process and for the calling thread, in float32.

    Call it in the thread that computes. Both choices change bits, so the simulator and the deployed services call
    this one function: equal arguments are part of their agreement to the bit. Denormals cost up to a hundred times
    the time of a normal number, and a sub-generator's saturated Tanh makes plenty.

    Args:
        num_threads: threads of one operation, at least 1. More than the idle cores makes training slower, not faster.
    """
    import torch

    torch.set_num_threads(max(1, num_threads))
    torch.set_flush_denormal(True)
    torch.set_default_dtype(torch.float32)  # a package of others may have chosen another when it was imported


@contextlib.contextmanager
def torch_as_it_comes() -> Iterator[None]:
    """Compute in a program of others as in a process of our own, whatever it set in PyTorch; that stays as it was.

    Some of it is set for all threads: of those that compute at the same time the last one puts it back.
    """
    import torch

    mkldnn: Any = torch.backends.mkldnn  # its stubs lack ``matmul`` and ``conv``
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.inference_mode(False))  # which ends no_grad too
        if torch.get_default_device().type != "cpu":  # a device that is set costs every call some microseconds
            stack.enter_context(torch.device("cpu"))
        flushes = not (torch.full((1,), 1e-40, dtype=torch.float32) * 1).any()
        with _turn:
            # As set_float32_matmul_precision chooses for ``matmul``; "none" and "ieee" keep float32's bits.
            precisions = [(one, one.fp32_precision) for one in (mkldnn.matmul, mkldnn.conv)]
            rounded = [(one, said) for one, said in precisions if said in {"bf16", "tf32"}]
            me, found = threading.get_ident(), (torch.get_num_threads(), torch.get_default_dtype(), rounded)
            within = me in (thread for thread, _ in _theirs)
            theirs = me, _theirs[0][1] if _theirs else found
            _theirs.append(theirs)
            torch.set_default_dtype(torch.float32)
            for one, _ in rounded:
                one.fp32_precision = "ieee"
        try:
            yield
        finally:
            torch.set_flush_denormal(flushes)
            with _turn:
                _theirs.remove(theirs)
                threads, dtype, rounded = theirs[1]
                torch.set_num_threads(found[0] if within else threads)  # a new thread begins with those of who computes
                if not _theirs:
                    torch.set_default_dtype(dtype)
                    for one, said in rounded:
                        one.fp32_precision = said


_turn = threading.Lock()
_theirs: list[tuple[int, tuple[int, Any, list[tuple[Any, str]]]]] = []
"""Thread of each that computes now, and what the program had set."""


def leave_the_compiler_out() -> None:
    """Let optimisers step without importing PyTorch's compiler; once, in a process of our own that compiles nothing.

    They import it only to say that it isn't to compile them: 80 MB of memory, and a second or more of a fast processor
    in the first step. The functions themselves, and so all bits, stay what they are.
    """
    import torch

    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        setattr(torch.optim.Optimizer, name, inspect.unwrap(getattr(torch.optim.Optimizer, name)))
    for kind in (torch.optim.Adam, torch.optim.SGD):
        kind.step = torch.no_grad()(inspect.unwrap(kind.step))  # type: ignore[method-assign]
