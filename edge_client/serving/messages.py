"""What the client and a serving process say to each other; nothing is pickled, and no pixel goes through a socket.

On the control socket: one ``Load``, then one answer, ``Loaded`` or ``Refused``. On each lane, a socket with
shared memory of its own: ``Run`` once the images stand in the memory, then ``Answered`` once the outputs do, or
``Failed``. One packet is one message. The process ends when the client's ends of the sockets do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import msgspec

from replayfleet.federation.wire.transport.blob_store import FileLook

MAX_PACKET_BYTES = 65_536
MAX_DETAIL = 300
"""Characters."""

Provider: TypeAlias = str | tuple[str, dict[str, Any]]
"""An execution provider's name, or (name, options)."""
Shape: TypeAlias = tuple[Annotated[int, msgspec.Meta(ge=1)], ...]


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Which model to serve.

    Attributes:
        blobs: root of the blob store.
        graph: digest of the ONNX graph.
        parameters: digest of the parameters that the graph leaves open.
        image_shape: (C, H, W).
        num_threads: of one inference.
        providers: execution providers; the first must be the one that really runs.
        facts: architecture, classes and preprocessing that the fleet agreed on, each ``comparable``; a graph that says
            otherwise is refused.
        verified: of ``DiskBlobStore``.
    """

    blobs: str
    graph: str
    parameters: str
    image_shape: Shape
    num_threads: int
    providers: tuple[Provider, ...]
    facts: dict[str, str] = {}
    verified: dict[str, FileLook] = {}


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The model is loaded and has answered one blank image.

    Attributes:
        output_shape: of one image's outputs.
        runs_on: the execution provider that really runs.
        first_s: seconds of that first answer, which is slower than those that follow.
    """

    output_shape: Shape
    runs_on: str
    first_s: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The model can't be served; ``reason`` is the value of a ``Reason``."""

    reason: str
    detail: str


class Run(msgspec.Struct, frozen=True, tag="run"):
    """So many images stand in the lane's memory."""

    num_images: Annotated[int, msgspec.Meta(ge=1)]


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The outputs of all of them stand there too."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The model failed on these images, and takes others; ``no_memory``: for want of memory, which may pass."""

    detail: str
    no_memory: bool = False


ToWorker: TypeAlias = Load | Run
FromWorker: TypeAlias = Loaded | Refused | Answered | Failed

packet = msgspec.msgpack.Encoder().encode
"""Message -> what travels."""

to_worker: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode
"""What the client wrote -> message; msgspec.MsgspecError if it is none of it."""

from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode
"""What the process wrote -> message; msgspec.MsgspecError if it is none of it."""


def in_short(error: BaseException | str) -> str:
    """Return an error as one short line."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:MAX_DETAIL]


def comparable(fact: str) -> str:
    """Return what stands for a fact in a message: names of thousands of classes fit into no packet, and no log."""
    return fact if len(fact) <= 120 else f"{fact[:40]}... {hashlib.sha256(fact.encode()).hexdigest()}"
