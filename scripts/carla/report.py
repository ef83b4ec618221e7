"""The page of a finished driving demo; ``python -m replayfleet.scripts.carla.report OUT`` makes it again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from replayfleet.federation.service.command import run_command
from replayfleet.federation.streams.driving.recording import Driving
from replayfleet.scripts.carla.facts import PARTS, read_facts, read_marker
from replayfleet.scripts.carla.page import page, summary
from replayfleet.scripts.carla.plan import VEHICLES, film_name
from replayfleet.scripts.carla.quality import measure
from replayfleet.scripts.carla.roads import RecordedRoads, Roads, StreetRoads
from replayfleet.scripts.carla.stills import Still, still
from replayfleet.scripts.launch.report import Report, write_again

_STRETCHES = ((0.6, 0.75), (0.85, 1.0))
"""Of each vehicle's film, where its still comes from: late, when models have learned, and not in the same town."""


def write_report(out: Path) -> Report:
    """Measure the last models, read everything else from the demo's folder, and write ``report.html`` there.

    Raises:
        ReplayfleetError: The demo didn't finish; says what is missing.
    """
    marker = read_marker(out)
    roads = roads_of(out, marker)
    for part in PARTS:
        measure(out / part, VEHICLES, roads)
    facts = read_facts(out)
    path = out / "report.html"
    path.write_text(page(facts, _stills(out)), encoding="utf-8")
    return Report(path, summary(facts))


def roads_of(out: Path, marker: Mapping[str, Any]) -> Roads:
    """Return the roads that a demo drove on.

    Raises:
        SettingsError: The recording is gone.
    """
    towns = next(iter(marker["towns"].values()))[VEHICLES[0]]
    if marker["synthetic"]:
        return StreetRoads(towns, int(marker["frames_per_town"]))
    return RecordedRoads(Driving(out / "roads"), Path(marker["recording"]))


def _stills(out: Path) -> dict[str, list[Still]]:
    found = {
        part: [still(out / film_name(part, name), *_STRETCHES[index]) for index, name in enumerate(VEHICLES)]
        for part in PARTS
    }
    return {part: [one for one in pictures if one is not None] for part, pictures in found.items()}


@click.command()
@click.argument("out", type=click.Path(path_type=Path, exists=True, file_okay=False))
def report(out: Path) -> None:
    """Write OUT/report.html of the driving demo that ran in OUT."""
    from replayfleet.federation.service.torch_setup import prepare_torch

    prepare_torch(1)
    write_again(lambda: write_report(out))


if __name__ == "__main__":
    run_command(report, "carla-report")
