"""The serving process; its arguments are descriptors: ``CONTROL LANE MEMORY LANE MEMORY ...``.

It serves one model, so that a swap is a change of process: what a model leaks or breaks goes with it. It imports
neither torch nor MQTT, is the first that the kernel kills when memory runs out, and ends when its client does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from replayfleet.devices.memory import give_memory_back, no_more_huge_pages
from replayfleet.edge_client.serving import messages
from replayfleet.edge_client.serving.area import Area
from replayfleet.edge_client.serving.loading import LoadedModel, load_model
from replayfleet.edge_client.serving.messages import MAX_PACKET_BYTES, Load, Run, in_short, packet, to_worker
from replayfleet.edge_client.serving.slot import Model
from replayfleet.federation.errors import ArtefactRejected, Reason, is_out_of_memory

_ECHO = bytes.fromhex(
    "08083a3a0a100a017812017922084964656e7469747912046563686f5a0f0a0178120a0a08080112040a020801620f0a0179120a0a08080112040a02080142040a001011"
)
"""An ONNX file: one Identity from "x" to "y", both float32 of shape (1,)."""

_OUT_OF_MEMORY_FIRST = "500"
"""Of 1000; the client's own is 0."""


def main(load: Callable[[Load], LoadedModel] = load_model) -> None:
    """Serve what the client says, in a process of our own."""
    serve([int(argument) for argument in sys.argv[1:]], load)


def prepare() -> None:
    """Import what loading a model needs, ahead of the first, and open a graph that answers what it is asked.

    ONNX Runtime registers its operators with the first session: 5 ms that each forked process would need again. One
    thread opens it, and none is left.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    onnxruntime.InferenceSession(_ECHO, options, providers=["CPUExecutionProvider"])


def serve(fds: Sequence[int], load: Callable[[Load], LoadedModel] = load_model) -> None:
    """Serve one model until the client's end of the control socket closes."""
    # The client's to handle; a process that left first would look crashed.
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OUT_OF_MEMORY_FIRST, encoding="ascii")
    control = socket.socket(fileno=fds[0])
    gone = threading.Thread(target=_end_with, args=(control.fileno(),), name="client", daemon=True)
    gone.start()
    data = control.recv(MAX_PACKET_BYTES)
    if not data:
        return  # the client died before it said what to serve
    job = to_worker(data)
    assert isinstance(job, Load)
    model = _loaded(job, control, load)
    no_more_huge_pages()
    give_memory_back()  # loading takes twice what serving does
    for lane, memory in zip(fds[1::2], fds[2::2], strict=True):
        area = Area(memory, job.image_shape, model.output_shape)
        threading.Thread(target=_serve, args=(socket.socket(fileno=lane), area, model.run), daemon=True).start()
    _tell(control, messages.Loaded(model.output_shape, model.runs_on, model.first_s))
    gone.join()


def answer(images: int, area: Area, run: Model) -> messages.FromWorker:
    """Run the model on the first ``images`` images of the area, and leave the outputs there."""
    try:
        outputs = run(area.images[:images])
        expected = (images, *area.outputs.shape[1:])
        if outputs.shape != expected or outputs.dtype != np.float32:
            raise ValueError(f"outputs are {outputs.shape} {outputs.dtype}, expected {expected} float32")
        area.outputs[:images] = outputs
    except Exception as error:  # runtimes share no exception class
        return messages.Failed(in_short(error), is_out_of_memory(error))
    return messages.Answered()


def _loaded(job: Load, control: socket.socket, load: Callable[[Load], LoadedModel]) -> LoadedModel:
    try:
        return load(job)
    except Exception as error:  # runtimes share no exception class
        reason = error.reason if isinstance(error, ArtefactRejected) else Reason.LOAD_FAILED
        if isinstance(error, OSError) or is_out_of_memory(error):
            reason = Reason.BUSY  # the machine's doing, which passes
        detail = error.detail if isinstance(error, ArtefactRejected) else in_short(error)
        _tell(control, messages.Refused(reason.value, in_short(detail)))
        sys.exit(0)


def _tell(control: socket.socket, message: messages.FromWorker) -> None:
    with contextlib.suppress(OSError):  # the client is gone, and this process ends with it
        control.send(packet(message))


def _serve(lane: socket.socket, area: Area, run: Model) -> None:
    with contextlib.suppress(OSError):  # the client is gone
        while data := lane.recv(MAX_PACKET_BYTES):
            job = to_worker(data)
            assert isinstance(job, Run)
            lane.send(packet(answer(job.num_images, area, run)))


def _end_with(control: int) -> None:
    """Wait for the client's end to close, whatever the other threads are busy with."""
    hangup = select.poll()
    hangup.register(control, select.POLLRDHUP)
    hangup.poll()
    os._exit(0)
