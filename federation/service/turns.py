"""How a loop is ended, and how others see that it still turns."""

from __future__ import annotations

import threading
import time

_LOOK_S = 1.0


class CountedStop(threading.Event):
    """A stop signal that counts how often it is looked at.

    Every camera looks at its signal between pictures, while it waits for its turn and while it tries a lost camera
    again; inference looks at its own between two answers. So a loop that hangs is one whose count stands still, and
    waiting counts: it is what an idle loop is there to do. One loop looks at a signal; any thread may set it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        """Rises with every look."""

    def is_set(self) -> bool:
        """Whether the loop is to end."""
        self.turns += 1
        return super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most ``timeout`` seconds; a long wait counts every second."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self.turns += 1
            left = _LOOK_S if deadline is None else deadline - time.monotonic()
            if super().wait(min(max(left, 0.0), _LOOK_S)):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
