"""Records of MFCL: those of all whose aggregator makes images, and what tasks of several rounds add."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from replayfleet.federation.methods.kit.packing import OPTIONAL_CLASS_IDS, OPTIONAL_COUNT, OneSet
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.synthesis_records import SynthesisDownload, SynthesisState


@dataclass(frozen=True, slots=True)
class Download(SynthesisDownload):
    """What a client gets for a round; ``seen`` are the classes that the generator draws.

    Attributes:
        teacher: the average model at the end of the last task; empty if that is ``task_parameters``.
    """

    teacher: Annotated[Parameters, OneSet()] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AggregatorState(SynthesisState):
    """What the aggregator remembers between rounds.

    Attributes:
        teacher: the average model at the end of the last task; empty where a task is a round.
        taught: classes that the teacher has met, in rising order.
        rounds_of_task: that the present task has had.
    """

    teacher: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    taught: Annotated[tuple[int, ...], OPTIONAL_CLASS_IDS] = ()
    rounds_of_task: Annotated[int, OPTIONAL_COUNT] = 0
