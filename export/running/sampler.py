"""Draws replay through an exported sub-generator: the sampler that a device gives to its method."""

from __future__ import annotations

import torch
from torch import Tensor

from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.methods.kit.records import Draw, Parameters, Sampler


def onnx_sampler(graph: bytes, num_threads: int) -> Sampler:
    """Return a sampler that runs sub-generators in ONNX Runtime.

    Args:
        graph: from ``export.graphs.graph.sub_generator_graph``.
        num_threads: equal numbers give equal bits on one machine, as the fleet's bit-for-bit comparison needs.

    Returns:
        parameters -> draw; making a draw costs a few ms and raises ArtefactRejected (load-failed) if they don't fit.
    """

    def bind(parameters: Parameters) -> Draw:
        arrays = {name: value.detach().cpu().numpy() for name, value in parameters.items()}
        model = OnnxModel(graph, arrays, num_threads=num_threads, arena=False)

        def draw(latents: Tensor) -> Tensor:
            return torch.from_numpy(model.run(latents.detach().cpu().numpy()))

        return draw

    return bind
