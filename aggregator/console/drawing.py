"""What one client's newest sub-generators draw, as PNG: a process, for PyTorch is large and drawing takes a while.

    python -m replayfleet.aggregator.console.drawing DATA_DIR CLIENT

Prints JSON: class id -> ``png`` in base64, and ``recognised``, the share that the client's own task model takes for it.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from numpy.typing import NDArray

from replayfleet.federation.children import die_with_parent
from replayfleet.federation.errors import ReplayfleetError

if TYPE_CHECKING:
    import torch

    from replayfleet.aggregator.store import StoredArtefacts

NUM_COLUMNS, NUM_ROWS, NUM_JUDGED = 5, 2, 64
_NICE = 10


def samples(
    method: Any, client: Any, rng: torch.Generator, num_samples: int, num_judged: int
) -> Iterator[tuple[int, NDArray[Any], float | None]]:
    """Yield (class id, images (B, C, H, W) in [-1, 1], share recognised) of every sub-generator, unfiltered.

    The share is None of a generator of all classes.

    Args:
        method: whose state the client's record is of.
        client: what the aggregator holds of it.
        rng: source of latents.
        num_samples: B.
        num_judged: that the client's task model is asked about.
    """
    import torch

    from replayfleet.federation.methods.kit.packing import ALL_CLASSES
    from replayfleet.federation.methods.steps.memory import sampler_of
    from replayfleet.federation.methods.steps.replay import recognised_share
    from replayfleet.federation.methods.steps.task_model import judge_with
    from replayfleet.models.specs import LATENT_SIZE

    sampler, judge = sampler_of(method), judge_with(method.task, client.task_parameters)
    for class_id, parameters in sorted(client.sub_generators.items()):
        draw = sampler(parameters)
        images = draw(torch.randn(num_samples, LATENT_SIZE, generator=rng)).numpy()
        is_all = class_id == ALL_CLASSES
        yield class_id, images, None if is_all else recognised_share(draw, class_id, judge, rng, num_judged)


def drawn(folder: Path, client: str) -> dict[str, dict[str, Any]]:
    """Return what is printed.

    Raises:
        ReplayfleetError: The store has nothing of that client, or it can't be read.
    """
    from PIL import Image

    from replayfleet.aggregator.aggregation import restore_artefacts
    from replayfleet.aggregator.store import AggregatorStore
    from replayfleet.federation.methods.kit.seeding import seeded_generator
    from replayfleet.federation.service.fleet.spec import method_of
    from replayfleet.federation.service.pages import contact_sheet
    from replayfleet.federation.service.torch_setup import prepare_torch
    from replayfleet.federation.wire.transport.blob_store import DiskBlobStore

    prepare_torch(1)
    with contextlib.closing(AggregatorStore(folder, read_only=True)) as store:
        state, spec = store.state(), store.spec()
    if state is None or spec is None:
        raise ReplayfleetError(f"{folder} holds no finished round")
    method: Any = method_of(spec)
    artefacts = restore_artefacts(_of(state, client), DiskBlobStore(folder / "blobs"))
    facts = {**artefacts.facts, "clients": {client: artefacts.facts["clients"][client]}}
    known = method.AggregatorState.unpack(dataclasses.replace(artefacts, facts=facts)).clients[client]
    rng = seeded_generator(spec.run_seed, 0, f"console/{client}")
    found = {}
    for class_id, images, recognised in samples(method, known, rng, NUM_COLUMNS * NUM_ROWS, NUM_JUDGED):
        sheet, png = contact_sheet(images, NUM_COLUMNS, NUM_ROWS), io.BytesIO()
        Image.fromarray(sheet[..., 0] if sheet.shape[-1] == 1 else sheet).save(png, "png")
        found[str(class_id)] = {"png": base64.b64encode(png.getvalue()).decode(), "recognised": recognised}
    return found


def _of(state: StoredArtefacts, client: str) -> StoredArtefacts:
    """Leave other clients' models where they are."""
    mine = f"clients/{client}/"
    blobs = tuple(one for one in state.blobs if one.name.startswith(mine) or not one.name.startswith("clients/"))
    return msgspec.structs.replace(state, blobs=blobs)


def main() -> None:
    """Draw for the process that started this one."""
    die_with_parent(signal.SIGKILL)
    os.nice(_NICE)
    sys.stdout.write(json.dumps(drawn(Path(sys.argv[1]), sys.argv[2])))


if __name__ == "__main__":
    main()
