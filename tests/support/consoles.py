"""A console as a process."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from replayfleet.federation.children import child_command


@contextlib.contextmanager
def console(folder: Path, *arguments: str) -> Iterator[str]:
    """Run ``aggregator console``; yields its address."""
    command = child_command(
        "replayfleet.aggregator.console.command", "--data-dir", str(folder), "--listen", "127.0.0.1:0", *arguments
    )
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, f"no console: {process.wait()}"
                found = re.search(r"url=(\S+)/", line)
            yield found[1]
        finally:
            process.terminate()
            process.communicate()
