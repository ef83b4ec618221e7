from __future__ import annotations

import gc
import importlib

import pytest

from replayfleet.federation.imports import without_collections


def test_nothing_is_collected_meanwhile_whatever_comes_of_the_import() -> None:
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), without_collections():
        importlib.import_module("nobody_has_this")
    assert gc.isenabled()


def test_who_collects_nothing_goes_on_collecting_nothing() -> None:
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
