"""SDD with real images as replay: what lies between its rows then isn't synthesis's doing.

    python -m replayfleet.scripts.experiments.real_replay sdd --data-root DATA --out runs/real-replay/sdd

A row of a table of SDD's, seed 0, but a hundred images of the data set stand in for those that the aggregator makes of
each class: clients replay them, and rows of new classes are weighed by them. ``--set`` changes settings of the row, for
example ``fine_tuning_scale=0.001`` and ``old_rows_scale=0`` for the paper's step sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import torch

from replayfleet.federation.methods.sdd import SDD
from replayfleet.federation.methods.steps.data_free import to_bytes
from replayfleet.federation.methods.synthesis_records import IMAGES
from replayfleet.federation.paths import ANY_PATH
from replayfleet.federation.service.command import run_command
from replayfleet.federation.simulator.tables.paper import paper_table
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.federation.streams.labelled_images import LabelledImages, normalise
from replayfleet.runs import simulate

IMAGES_PER_CLASS = 100


def real_images(images: LabelledImages) -> dict[int, dict[str, torch.Tensor]]:
    """Return ``images`` (100, C, H, W) uint8 of each class, drawn once."""
    rng, labels = np.random.RandomState(7), np.asarray(images.labels)
    drawn = {}
    for class_id in range(len(images.class_names)):
        places = np.sort(rng.permutation(np.flatnonzero(labels == class_id))[:IMAGES_PER_CLASS])
        drawn[class_id] = {IMAGES: to_bytes(torch.from_numpy(normalise(np.asarray(images.images[places]))))}
    return drawn


@click.command()
@click.argument("method", type=click.Choice(["sdd-baseline", "sdd-nagr", "sdd-cswa", "sdd"]))
@click.option("--table", default="sdd-released-steps", help="Whose stream, network and settings.")
@click.option("--data-root", type=ANY_PATH, required=True)
@click.option("--out", type=ANY_PATH, required=True)
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE")
def real_replay(method: str, table: str, data_root: Path, out: Path, changes: tuple[str, ...]) -> None:
    """Run METHOD's row of a table, seed 0, with a hundred real images of each class as replay."""
    chosen = paper_table(table)
    column = chosen.columns[0]
    row = next(each for each in chosen.rows if each.method == method)
    drawn = real_images(load_dataset(column.dataset, data_root=data_root).train)

    def images_of(_self: SDD, _teacher: Any, generator: Any, classes: tuple[int, ...], *_: Any) -> tuple[Any, Any]:
        return generator, {class_id: drawn[class_id] for class_id in classes}

    settings, changed = (dict(each.partition("=")[::2] for each in several) for several in (chosen.overrides, changes))
    with patch.object(SDD, "_images_of", images_of):
        simulate(
            method,
            out=out,
            dataset=column.dataset,
            scenario=column.scenario,
            model=column.model,
            data_root=data_root,
            threads=1,
            set={**column.set, **settings, **row.set, **changed},
            on_round=lambda each: click.echo(f"round {each.record.round}  {100 * each.record.accuracy:.2f} %"),
        )


if __name__ == "__main__":
    run_command(real_replay, "real_replay")
