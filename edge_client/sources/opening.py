"""From ``--source`` to a source: checked as far as possible at the start, opened when the fleet's task is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from edge_client.sources.base import Source
from edge_client.sources.folder import FolderSource, check_folder
from edge_client.sources.uri import DatasetUri, parse_source
from models.specs import TaskSpec

OpenSource: TypeAlias = Callable[[TaskSpec], Source]
"""Raises SettingsError if the source doesn't fit the task."""

_LEDGER = "folder-rounds"


def source_opener(uri: str, data_dir: Path, data_root: Path | None = None) -> OpenSource:
    """Check a source and return what opens it.

    Args:
        uri: as the operator wrote it.
        data_dir: the client's, for what a source must remember; nothing is written yet.
        data_root: where data sets lie.

    Raises:
        SettingsError: Unknown scheme, key, data set or scenario, or data that are absent.
    """
    parsed = parse_source(uri)
    if isinstance(parsed, DatasetUri):
        from edge_client.sources.dataset import DatasetSource

        dataset = DatasetSource(parsed, data_root)

        def open_dataset(task: TaskSpec) -> Source:
            dataset.check_task(task)
            return dataset

        return open_dataset
    check_folder(parsed)
    return lambda task: FolderSource(parsed, task, data_dir / _LEDGER)
