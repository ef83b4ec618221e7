"""What cameras can be read with: V4L2 devices, OpenCV's backends, GStreamer's elements, named sources."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

from replayfleet.devices.profiles import DeviceProfile
from replayfleet.edge_client.cameras.kinds import ALL_CAMERAS
from replayfleet.edge_client.cameras.live.device import DeviceCameraSettings
from replayfleet.edge_client.cameras.live.opencv import has_backend, require_gstreamer
from replayfleet.edge_client.cameras.live.rtsp import RtspCameraSettings
from replayfleet.edge_client.cameras.live.supervised import LiveSettings
from replayfleet.edge_client.cameras.uri import CameraUri
from replayfleet.edge_client.doctor.findings import Finding, failure, joined, ok, skipped, warning
from replayfleet.federation.errors import SettingsError

BACKENDS = ("V4L2", "FFMPEG", "GSTREAMER")
"""OpenCV's, for ``camera://``, for ``rtsp://`` and films, for ``csi://`` and hardware decoders."""

READY = "what reads it is installed; not opened"

INSPECT = "gst-inspect-1.0"
INSPECT_S = 20.0
"""GStreamer reads all of its plugins when it is first asked."""


def look_at_devices(root: Path = Path("/")) -> list[Finding]:
    """Return the cameras that the kernel has, and whether this user may read them."""
    devices = sorted((root / "dev").glob("video[0-9]*"), key=lambda path: (len(path.name), path.name))
    named = {f"/dev/{path.name}": _device_name(root, path.name) for path in devices}
    found = joined([f"{path} ({name})" if name else path for path, name in named.items()], "no V4L2 device")
    closed = [f"/dev/{path.name}" for path in devices if not os.access(path, os.R_OK | os.W_OK)]
    facts = {"devices": named, "not_allowed": closed}
    if closed:
        advice = "sudo usermod -aG video $USER, and log in again; a systemd unit needs SupplementaryGroups=video"
        return [warning("cameras.devices", f"{found}; this user may not read {joined(closed)}", advice, **facts)]
    return [ok("cameras.devices", found, **facts)]


def look_at_backends(profile: DeviceProfile) -> list[Finding]:
    """Return what this OpenCV can read; ``getBackends()`` would list some that it lacks."""
    if importlib.util.find_spec("cv2") is None:
        return [skipped("cameras.backends", "no OpenCV: see package.opencv")]
    there = {backend.lower(): has_backend(backend) for backend in BACKENDS}
    found = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in there.items())
    if profile.camera.elements and not there["gstreamer"]:
        try:
            require_gstreamer("csi:// and the hardware decoder")
        except SettingsError as error:
            return [warning("cameras.backends", found, str(error), **there)]
    return [ok("cameras.backends", found, **there)]


def look_at_elements(profile: DeviceProfile) -> list[Finding]:
    """Return whether GStreamer has what this board's cameras are read with."""
    elements = profile.camera.elements
    if not elements:
        return [skipped("cameras.elements", f"--device {profile.name} needs no GStreamer elements")]
    if shutil.which(INSPECT) is None:
        return [skipped("cameras.elements", f"{INSPECT} isn't there to ask", "apt install gstreamer1.0-tools")]
    ask = partial(subprocess.run, capture_output=True, timeout=INSPECT_S, check=False)
    missing = [element for element in elements if ask((INSPECT, "--exists", element)).returncode]
    if missing:
        advice = "apt install nvidia-l4t-gstreamer; in a container, run it with --runtime nvidia"
        return [warning("cameras.elements", f"GStreamer lacks {joined(missing)}", advice, missing=missing)]
    return [ok("cameras.elements", joined(elements), missing=[])]


def look_at_source(camera: CameraUri, profile: DeviceProfile, root: Path = Path("/")) -> list[Finding]:
    """Return whether a camera that was named is there and can be read with what is installed; nothing is opened."""
    check = f"source.{camera.name}"
    if not ALL_CAMERAS[camera.scheme].supervised:
        return [skipped(check, f"{camera.scheme}:// is looked at by edge-client start")]
    found: LiveSettings = camera.settings
    try:
        found.check()
    except SettingsError as error:
        return [failure(check, f"{found.describe()} can't be read", str(error))]
    if isinstance(camera.settings, DeviceCameraSettings):
        place = camera.settings.place
        device = f"/dev/video{place}" if place.isdigit() else place
        if not (root / device[1:]).exists():
            return [failure(check, f"{found.describe()}: there is no {device}", "plug it in; see cameras.devices")]
    best = profile.camera.decoder
    if isinstance(camera.settings, RtspCameraSettings) and camera.settings.decoder != best:
        try:
            dataclasses.replace(camera.settings, decoder=best).check()  # type: ignore[arg-type]
        except SettingsError:
            return [ok(check, f"{found.describe()}: {READY}")]
        return [ok(check, f"{found.describe()}: {READY}", f"add decoder={best} to it: this board decodes in hardware")]
    return [ok(check, f"{found.describe()}: {READY}")]


def _device_name(root: Path, name: str) -> str:
    try:
        return (root / "sys/class/video4linux" / name / "name").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
