"""What a board can do: execution providers, precision, memory, what training may spend, how cameras are read.

Memory and cores are those of NVIDIA's data sheets (developer.nvidia.com/embedded/jetson-modules; for Thor of T4000 and
T5000). None of these boards was at hand.

``core_gflops`` is a tenth of a core's float32 peak, where training ends up with small convolutions, and only a first
guess, until rounds were measured: clock rate times operations per cycle, which are 8 for a Cortex-A72 (one 128-bit
multiply-add), 16 for a Cortex-A78AE (two) and 32 for a Neoverse V3AE (four; Arm's software optimisation guides). A
Carmel is taken for a Cortex-A78AE.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from replayfleet.devices.budget import TrainingAllowance
from replayfleet.federation.errors import SettingsError, nearest

AUTO = "auto"
"""The name that stands for whichever profile fits the board; ``devices.probing.chosen`` finds it."""

JETSON = "jetson"
"""The name that stands for whichever Jetson this is; off a known Jetson, the profile of that name."""

GIB = 1 << 30

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"

FP32, FP16, INT8 = "fp32", "fp16", "int8"
PRECISIONS = (FP32, FP16, INT8)
"""What a served model may compute in."""

REQUIRABLE = {"tensorrt": TENSORRT, "cuda": CUDA, "cpu": CPU}
"""What ``--require-provider`` takes."""


@dataclass(frozen=True, slots=True)
class CameraPipeline:
    """What a board reads cameras with.

    Attributes:
        decoder: the value of an ``rtsp://`` source's ``decoder`` that is quickest here. Only advised: it must be told
            the codec, and ``ffmpeg``, which sees that for itself, works everywhere.
        elements: GStreamer elements that ``csi://`` sources and this decoder need; empty: neither needs GStreamer.
    """

    decoder: str = "ffmpeg"
    elements: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A class of boards.

    Attributes:
        name: what ``--device`` takes.
        execution_providers: ONNX Runtime providers that can serve at once, in order of preference; the last one always
            works.
        inference_threads: intra-op threads of the serving session; training shares the cores.
        tensorrt: an engine for TensorRT is worth its minutes of building here. ONNX Runtime keys its engine cache by
            the graph, not by the parameters, so TensorRT is never among the providers that serve at once.
        precision: one of ``PRECISIONS``: what serves quickest with the first provider; ``model-export --device`` makes
            it, and a client asks its fleet for it. By data sheets: tensor cores, which all of NVIDIA's boards below
            have, take float16 and not float32.
        min_memory_bytes: of the smallest board of this class; the doctor warns of less.
        allowance: what training may spend.
        camera: what cameras can be read with; the doctor looks for it.
        vendor_runtime: OpenCV and ONNX Runtime come from the board's vendor, not from PyPI.
    """

    name: str
    execution_providers: tuple[str, ...]
    inference_threads: int
    tensorrt: bool = False
    precision: str = FP32
    min_memory_bytes: int = GIB
    allowance: TrainingAllowance = field(default_factory=TrainingAllowance)
    camera: CameraPipeline = CameraPipeline()
    vendor_runtime: bool = False

    def __post_init__(self) -> None:
        if not self.execution_providers or self.execution_providers[-1] != CPU:
            raise ValueError(f"profile {self.name!r}: the last execution provider must be {CPU}")
        if TENSORRT in self.execution_providers:
            raise ValueError(f"profile {self.name!r}: {TENSORRT} can't serve at once; set tensorrt instead")
        if self.inference_threads < 1:
            raise ValueError(f"profile {self.name!r}: inference_threads is {self.inference_threads}, expected >= 1")


ARGUS = CameraPipeline("nvv4l2", ("nvarguscamerasrc", "nvvidconv", "nvv4l2decoder"))
"""All Jetsons decode H.264 and H.265 in hardware; the Orin Nano lacks an encoder only."""


def _jetson(
    name: str, *, memory_gib: int, core_gflops: float, tensorrt: bool = True, training_bytes: int | None = None
) -> DeviceProfile:
    return DeviceProfile(
        name,
        (CUDA, CPU),
        inference_threads=2,
        tensorrt=tensorrt,
        precision=FP16,
        min_memory_bytes=memory_gib * GIB,
        allowance=TrainingAllowance(core_gflops=core_gflops, memory_bytes=training_bytes),
        camera=ARGUS,
        vendor_runtime=True,
    )


_ALL = (
    DeviceProfile("cpu", (CPU,), inference_threads=1),
    # A Raspberry Pi 4: Cortex-A72 at 1.5 GHz, sold with 1 GB and more; slows down at 80 degrees (its documentation,
    # "Frequency management and thermal control"), which its thermal zone's own limits don't tell.
    DeviceProfile(
        "arm-cpu",
        (CPU,),
        inference_threads=1,
        allowance=TrainingAllowance(core_gflops=1.2, max_temperature_c=75.0),
    ),
    DeviceProfile("cuda", (CUDA, CPU), inference_threads=2, tensorrt=True, precision=FP16, min_memory_bytes=4 * GIB),
    # A Jetson that is none of those below: what all of them can do.
    _jetson(JETSON, memory_gib=4, core_gflops=2.4, tensorrt=False),
    # 6 cores at 1.5 GHz, 4 or 8 GB that CPU and GPU share: an engine's build would take what serving needs.
    _jetson("jetson-orin-nano", memory_gib=4, core_gflops=2.4, tensorrt=False, training_bytes=2 * GIB),
    # 6 or 8 cores at 2.0 GHz, 8 or 16 GB.
    _jetson("jetson-orin-nx", memory_gib=8, core_gflops=3.2),
    # 8 or 12 cores at 2.2 GHz, 32 or 64 GB.
    _jetson("jetson-agx-orin", memory_gib=32, core_gflops=3.5),
    # 12 or 14 cores at 2.6 GHz, 64 or 128 GB.
    _jetson("jetson-thor", memory_gib=64, core_gflops=8.3),
    # NX and AGX: 6 or 8 cores at 1.9 to 2.2 GHz, 8 to 64 GB. JetPack 5 is their last, with TensorRT 8.5.
    _jetson("jetson-xavier", memory_gib=8, core_gflops=3.0, tensorrt=False),
)

PROFILES = {board.name: board for board in _ALL}


def profile(name: str) -> DeviceProfile:
    """Return the profile of that name.

    Raises:
        SettingsError: No such profile; names the nearest. ``auto`` is none: it needs a look at the board.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise SettingsError(f"unknown device {name!r}{nearest(name, (*PROFILES, AUTO))}") from None


def check_device(name: str) -> None:
    """Raise SettingsError unless ``--device`` takes this name."""
    if name != AUTO:
        profile(name)


def required_provider(name: str) -> str:
    """Return ONNX Runtime's name of what ``--require-provider`` names.

    Raises:
        SettingsError: It takes no such name.
    """
    try:
        return REQUIRABLE[name]
    except KeyError:
        known = ", ".join(REQUIRABLE)
        raise SettingsError(f"--require-provider takes one of {known}, not {name!r}; nothing was started") from None
