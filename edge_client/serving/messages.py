"""What the client and a serving process say to each other; nothing is pickled, and no pixel goes through a socket.

On the control socket: one ``Load``, then one answer, ``Loaded`` or ``Refused``. On each lane, a socket with
shared memory of its own: ``Run`` once the images stand in the memory, then ``Answered`` once the outputs do, or
``Failed``. One packet is one message. The process ends when the client's ends of the sockets do.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

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
    """

    blobs: str
    graph: str
    parameters: str
    image_shape: Shape
    num_threads: int
    providers: tuple[Provider, ...]


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
    """The model failed on these images, and takes others."""

    detail: str


ToWorker: TypeAlias = Load | Run
FromWorker: TypeAlias = Loaded | Refused | Answered | Failed

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def packet(message: ToWorker | FromWorker) -> bytes:
    """Return what travels."""
    return _encoder.encode(message)


def to_worker(data: bytes) -> ToWorker:
    """Return what the client wrote; msgspec.MsgspecError if it is none of it."""
    return _to_worker.decode(data)


def from_worker(data: bytes) -> FromWorker:
    """Return what the process wrote; msgspec.MsgspecError if it is none of it."""
    return _from_worker.decode(data)


def in_short(error: BaseException | str) -> str:
    """Return an error as one short line."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:MAX_DETAIL]
