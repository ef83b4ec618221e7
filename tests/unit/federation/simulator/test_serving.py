"""What simulated clients serve, beside their states."""

from __future__ import annotations

import torch

from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.methods.steps.serving import Served
from replayfleet.federation.simulator.serving import ServedModels


def test_what_a_client_serves_and_chose_by_goes_on_after_a_stop() -> None:
    served = {"w": torch.arange(3.0)}
    chosen = Served("own", {"own": 0.75, "average": 0.5}, 0.25, 0.125, lost=True)
    before, state = ServedModels({"a": served, "b": served}, {"a": chosen}), Artefacts({"task": served}, {"seen": 3})
    after = ServedModels()
    for name in ("a", "b", "c"):
        after.restore(name, before.packed(name, state))
    assert after.choices == {"a": chosen}
    assert {name: own["w"].tolist() for name, own in after.parameters.items()} == {"a": [0, 1, 2], "b": [0, 1, 2]}
