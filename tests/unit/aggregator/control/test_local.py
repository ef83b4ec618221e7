from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replayfleet.aggregator.control.caller import SOCKET, LocalControl
from replayfleet.aggregator.control.local import LocalSocket
from replayfleet.aggregator.control.verbs import VerbRefused


class Named(SimpleNamespace):
    """Refuses whatever is asked, in its own name."""

    def look(self) -> Any:
        raise VerbRefused(self.name)


def test_a_socket_is_taken_away_by_who_bound_it_and_by_nobody_else(tmp_path: Path) -> None:
    """The first of two processes that ended left the other one without its socket, until a restart."""
    first: Any = LocalSocket(tmp_path, Named(name="first"))  # type: ignore[arg-type]
    second: Any = LocalSocket(tmp_path, Named(name="second"))  # type: ignore[arg-type]
    first.stop()
    with pytest.raises(VerbRefused, match="second"):
        LocalControl(tmp_path).look()
    second.stop()
    assert not (tmp_path / SOCKET).exists()
    second.stop()
