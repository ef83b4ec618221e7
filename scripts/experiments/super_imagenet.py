r"""SuperImageNet, the regrouping of ImageNet for federated class-incremental learning, as a folder of links.

    python -m replayfleet.scripts.experiments.super_imagenet --imagenet ILSVRC/Data/CLS-LOC --version L \
        --out DATA/super-imagenet-l
    fleet-sim mfcl --dataset folder --image-size 64 --data-root DATA/super-imagenet-l --scenario sequential ...

Babakniya et al. 2023 ("MFCL"), section 4 and Table 2: S has 100 classes of 2,500 images, M 75 of 5,000, L 50 of 7,500.
The paper doesn't print which classes it merged. ``--groups FILE`` takes them: a superclass's name, a tab, and the
WordNet ids of its classes, line by line. Without it, neighbours in the order of WordNet ids are merged, which are
related more often than not, and runs of them are taken evenly from the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.paths import ANY_PATH, FOLDER
from replayfleet.federation.service.command import run_command
from replayfleet.federation.streams.files.image_trees import class_files

Groups = Mapping[str, Sequence[str]]
"""Superclass -> WordNet ids."""


@dataclass(frozen=True, slots=True)
class Version:
    """One of the paper's Table 2.

    Attributes:
        num_classes: superclasses.
        num_images: training images of each.
        num_merged: classes of ImageNet in each: as few as have so many images.
    """

    num_classes: int
    num_images: int
    num_merged: int


VERSIONS = {"S": Version(100, 2500, 2), "M": Version(75, 5000, 4), "L": Version(50, 7500, 6)}


def neighbours(wnids: Sequence[str], version: Version) -> dict[str, list[str]]:
    """Return superclasses of ids that follow one another, runs taken evenly; named by their first id.

    Raises:
        SettingsError: There are too few classes.
    """
    ordered, size = sorted(wnids), version.num_merged
    num_runs = len(ordered) // size
    if num_runs < version.num_classes:
        raise SettingsError(
            f"{len(ordered)} classes make {num_runs} groups of {size}, expected {version.num_classes} or more"
        )
    starts = [size * (place * num_runs // version.num_classes) for place in range(version.num_classes)]
    return {f"{ordered[start]}-and-{size - 1}": ordered[start : start + size] for start in starts}


def read_groups(path: Path) -> dict[str, list[str]]:
    """Return what an operator merges.

    Raises:
        SettingsError: The file can't be read, a line has no ids, or a name or an id stands there twice.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} can't be read: {error}") from error
    groups: dict[str, list[str]] = {}
    for place, line in enumerate(lines, 1):
        name, _, ids = line.partition("\t")
        if not ids.split() or name in groups:
            raise SettingsError(f"{path}, line {place}: expected a new superclass's name, a tab and WordNet ids")
        groups[name] = ids.split()
    merged = [wnid for ids in groups.values() for wnid in ids]
    twice = sorted({wnid for wnid in merged if merged.count(wnid) > 1})
    if twice:
        raise SettingsError(f"{path}: {twice[0]} is in two superclasses")
    return groups


def link(imagenet: Path, out: Path, groups: Groups, num_images: int) -> dict[str, tuple[int, int]]:
    """Link a superclass's images into ``out/{train,test}/<superclass>``; return how many, by superclass.

    Training images are taken from its classes in turn, in the order of their names, up to ``num_images``. Those for
    tests are all of ``val/<wnid>``, or without such a folder up to a fifth as many of what is left over.

    Raises:
        SettingsError: A class has no images, or a superclass too few; nothing was linked then.
    """
    train = class_files(imagenet / "train" if (imagenet / "train").is_dir() else imagenet)
    held_out = class_files(imagenet / "val")
    chosen: dict[str, tuple[list[Path], list[Path]]] = {}
    for name, wnids in groups.items():
        absent = [wnid for wnid in wnids if wnid not in train]
        if absent:
            raise SettingsError(f"{imagenet} has no images of {absent[0]}, which {name} is to have")
        longest = max(len(train[wnid]) for wnid in wnids)
        in_turn = [train[wnid][place] for place in range(longest) for wnid in wnids if place < len(train[wnid])]
        if len(in_turn) < num_images:
            raise SettingsError(f"{name} has {len(in_turn)} images, expected {num_images} or more")
        left = in_turn[num_images:][: num_images // 5]
        tests = [path for wnid in wnids for path in held_out.get(wnid, [])]
        chosen[name] = (in_turn[:num_images], tests if held_out else left)
        if not chosen[name][1]:
            raise SettingsError(f"{name} has no images left for tests; put ImageNet's validation part in val/<wnid>/")
    for name, parts in chosen.items():
        for part, paths in zip(("train", "test"), parts, strict=True):
            folder = out / part / name
            folder.mkdir(parents=True)
            for path in paths:
                (folder / f"{path.parent.name}-{path.name}").symlink_to(path.resolve())
    return {name: (len(of_train), len(of_test)) for name, (of_train, of_test) in chosen.items()}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--imagenet", type=ANY_PATH, required=True, help="Folder with [train/]<wnid>/*.JPEG, perhaps val/<wnid>/."
)
@click.option("--version", type=click.Choice(list(VERSIONS)), default="L", help="Of the paper's Table 2.")
@click.option("--groups", type=ANY_PATH, help="Superclass, tab, WordNet ids, line by line; neighbours without it.")
@click.option("--out", type=FOLDER, required=True, help="Folder to make, for --dataset folder --data-root.")
def super_imagenet(imagenet: Path, version: str, groups: Path | None, out: Path) -> None:
    """Merge classes of ImageNet to fewer and larger ones, as links."""
    if (out / "train").exists():
        raise SettingsError(f"{out} holds a set already; choose another --out")
    wanted = VERSIONS[version]
    known = list(class_files(imagenet / "train" if (imagenet / "train").is_dir() else imagenet))
    merged = neighbours(known, wanted) if groups is None else read_groups(groups)
    counts = link(imagenet, out, merged, wanted.num_images)
    print(f"{out}: {len(counts)} classes, {sum(train for train, _ in counts.values())} training images")


if __name__ == "__main__":
    run_command(super_imagenet, "super-imagenet")
