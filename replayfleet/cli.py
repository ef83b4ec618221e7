"""``replayfleet``: the first minutes with an installed package; and where programs are put together from their rooms.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

from pathlib import Path


def model_export() -> None:
    """Run ``model-export``, handing in what opens runs and data dirs, which the export itself doesn't know."""
    from replayfleet.export.cli import main
    from replayfleet.export.parameters import Model

    def stored(path: Path, client: str | None, kind: str, class_: str | None) -> Model:
        from replayfleet.runs import stored_model

        return stored_model(path, client, kind, class_)

    main(obj=stored)
