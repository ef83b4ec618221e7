"""``model-export check``: what a file says about itself, and how long it takes, loaded as a device loads it."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replayfleet.export.batches import batches_for
from replayfleet.export.files import read_file
from replayfleet.export.latency import median_latencies_s
from replayfleet.export.parameters import ParameterFile, read_parameter_file
from replayfleet.export.running.artefact import Array, Run
from replayfleet.export.running.facts import own_facts
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.errors import ArtefactRejected, Reason

_REPEATS = 20
_MAX_VALUES = 2**26
"""Of one input: 4096 x 4096 pixels in colour, and more."""


def check_onnx(path: Path, parameters: Path | None, sha256: str | None, threads: int) -> Iterator[str]:
    """Yield the facts and latencies of an ONNX file; needs neither torch nor onnx.

    Raises:
        ArtefactRejected: (wrong-digest, load-failed) It is another file, or a device would refuse it.
        SettingsError: A file can't be read.
    """
    file = ParameterFile({}, None) if parameters is None else read_parameter_file(parameters)
    data = read_file(path)
    if sha256 not in {None, found := hashlib.sha256(data).hexdigest()}:
        raise ArtefactRejected(Reason.WRONG_DIGEST, f"{path} has sha256 {found}, expected {sha256}")
    loaded = OnnxModel(data, file.parameters, num_threads=threads)
    facts = own_facts(loaded.metadata)
    for key, value in file.facts.items():
        if facts.get(key, value) != value:
            detail = f"{key} is {facts[key][:80]!r} in {path}, but {value[:80]!r} in {parameters}"
            raise ArtefactRejected(Reason.WRONG_LAYOUT, detail)
    _check_facts(path, facts, loaded)
    yield from _said(facts)
    yield f"{'provider':<17} {loaded.active_providers[0]}"
    yield from _latencies(loaded.run, loaded.input_shape, facts.get("kind", ""), threads)


def _check_facts(path: Path, facts: Mapping[str, str], loaded: OnnxModel) -> None:
    """Raise ArtefactRejected if a file says of itself what its graph isn't."""
    answers = loaded.run(_inputs(1, loaded.input_shape)).shape[1:]
    found = {"input": [*loaded.input_shape], "output": [*answers]}
    for key, shape in found.items():
        if key in facts and facts[key] != json.dumps(shape):
            raise ArtefactRejected(Reason.WRONG_LAYOUT, f"{path} says {key} {facts[key][:80]}, its graph has {shape}")
    classes, anchors = _number_of("classes", facts), _number_of("anchors", facts)
    first = {"task": classes, "detector": anchors * (5 + classes)}.get(facts.get("kind", ""))
    if first is not None and first not in answers[:1]:
        boxes = f" and {anchors} anchors" if facts["kind"] == "detector" else ""
        detail = f"{path} names {classes} classes{boxes}, its graph answers {[*answers]} for a picture"
        raise ArtefactRejected(Reason.WRONG_LAYOUT, detail)


def _number_of(key: str, facts: Mapping[str, str]) -> int:
    try:
        return len(msgspec.json.decode(facts.get(key, "[]"), type=list[Any]))
    except msgspec.DecodeError:
        return 0


def check_torchscript(path: Path, sha256: str, threads: int) -> Iterator[str]:
    """Yield the facts and latencies of a TorchScript file; needs torch.

    Raises:
        ArtefactRejected: (wrong-digest, load-failed) It is another file, or doesn't load.
        SettingsError: It can't be read.
    """
    import torch

    from replayfleet.export.parity import eager_run
    from replayfleet.export.torchscript import load_torchscript, torchscript_facts

    data = read_file(path)
    loaded = load_torchscript(data, sha256)
    facts = torchscript_facts(data)
    yield from _said(facts)
    try:
        input_shape = msgspec.json.decode(facts.get("input", ""), type=tuple[int, ...])
    except msgspec.DecodeError as error:
        raise ArtefactRejected(Reason.WRONG_LAYOUT, f"{path} doesn't say what it takes ({error})") from error
    torch.set_num_threads(threads)
    yield from _latencies(eager_run(loaded), input_shape, facts.get("kind", ""), threads)


def _said(facts: Mapping[str, str]) -> Iterator[str]:
    """Yield what a file says about itself, without what it would do to a terminal."""
    for key, value in facts.items():
        said = value if value.isprintable() else ascii(value)
        yield f"{key if key.isprintable() else ascii(key):<17} {said}"


def _inputs(batch_size: int, shape: Sequence[int]) -> Array:
    """Return inputs to try a model with, whose shape a file says; none that takes more room than a picture may."""
    if min(shape, default=0) < 1 or math.prod(shape) > _MAX_VALUES:
        sides = " x ".join(map(str, shape))
        raise ArtefactRejected(Reason.TOO_LARGE, f"its input is {sides}, expected 1 to {_MAX_VALUES} values")
    return np.zeros((batch_size, *shape), dtype=np.float32)


def _latencies(run: Run, input_shape: Sequence[int], kind: str, threads: int) -> Iterator[str]:
    # A sampler runs its network once for each of its steps: 64 images would take minutes.
    for batch_size in (1,) if kind == "sampler" else (1, batches_for(input_shape)[-1]):
        x = _inputs(batch_size, input_shape)
        seconds = median_latencies_s({"model": functools.partial(run, x)}, repeats=_REPEATS)["model"]
        yield f"{f'batch {batch_size}':<17} {seconds * 1e3:.2f} ms with {threads} threads"
