"""How every process of the fleet runs PyTorch: bounded threads, no denormals."""

from __future__ import annotations


def prepare_torch(num_threads: int) -> None:
    """Bound PyTorch's threads and flush denormals to zero, in this process and for the calling thread.

    Call it in the thread that computes. Both choices change bits, so the simulator and the deployed services call
    this one function: equal arguments are part of their agreement to the bit. Denormals cost up to a hundred times
    the time of a normal number, and a sub-generator's saturated Tanh makes plenty.

    Args:
        num_threads: threads of one operation, at least 1. More than the idle cores makes training slower, not faster.
    """
    import torch

    torch.set_num_threads(max(1, num_threads))
    torch.set_flush_denormal(True)
