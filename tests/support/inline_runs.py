"""Runs of ``fleet-sim table`` in the test's own process, for tests of everything but the processes."""

from __future__ import annotations

import contextlib
import io

from replayfleet.federation.simulator import cli
from replayfleet.federation.simulator.tables import running
from replayfleet.federation.simulator.tables.plan import PlannedRun


class Inline:
    """A run in this process, finished when it begins."""

    def __init__(self, run: PlannedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                cli.run(run.spec, run.spec.command())
            self.code = 0
        except SystemExit as stopped:
            self.code = stopped.code
        except Exception as error:
            print(error, file=said)
            self.code = 2
        (run.folder / running.LOG).write_text(said.getvalue())

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        return self.code
