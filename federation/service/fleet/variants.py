"""Named variants of the methods, as settings: the ablations of pFedGRP and its versions, and FedGP's bases.

``fleet-sim`` and ``aggregator serve`` take these names wherever they take a method's. Plain values: importing this
module imports no torch.
"""

from __future__ import annotations

from typing import Any

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.extensions import METHODS_GROUP, packages_with

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "agem-fedgp": ("fedgp", {"base": "agem"}),
    "derpp-fedgp": ("fedgp", {"base": "der", "beta": 0.5}),
    "der-fedgp": ("fedgp", {"base": "der"}),
    "er-fedgp": ("fedgp", {"base": "der", "alpha": 0.0, "beta": 1.0}),
    "fedcurv-fedgp": ("fedgp", {"base": "fedcurv"}),
    "fedlwf-2t": ("lwf", {"new_weight": 0.33, "past_weight": 0.33, "server_weight": 0.34, "logits": "all"}),
    "fedprox-plus": ("ewc", {"weighting": "even", "importance": 0.01}),
    "fedprox-fedgp": ("fedgp", {"base": "fedprox"}),
    "pfedgrp-as1": ("pfedgrp", {"filter_replay": False}),
    "pfedgrp-as2": ("pfedgrp", {"gate": False}),
    "pfedgrp-as3": ("pfedgrp", {"generators": "single"}),
    "pfedgrp-asg": ("pfedgrp", {"alignment_weight": 0.0}),
    "pfedgrp-asp": ("pfedgrp", {"start_from": "personalised"}),
    "pfedgrp-ddpm": ("pfedgrp", {"sub_generator": "ddpm"}),
    "pfedgrp-mixture": ("pfedgrp", {"sub_generator": "pca-mixture"}),
    "pfedgrp-pca": ("pfedgrp", {"sub_generator": "pca-gaussian"}),
    "erdfr": ("sdd", {"replay_loss": "cross-entropy", "aggregation": "average", "teachers": "average"}),
    "sdd-baseline": ("sdd", {"replay_loss": "distillation", "aggregation": "average"}),
    "sdd-cswa": ("sdd", {"replay_loss": "distillation"}),
    "sdd-fedmax": (
        "sdd",
        {"replay_loss": "distillation", "aggregation": "average", "activation_weight": 1.0},
    ),
    "sdd-fedprox": ("sdd", {"replay_loss": "distillation", "aggregation": "average", "proximal_weight": 0.01}),
    "sdd-nagr": ("sdd", {"aggregation": "average"}),
    "pfedgrp-v1": (
        "pfedgrp",
        {"alignment_on": "earlier-classes", "warm_start": True, "gate": False, "filter_replay": False},
    ),
}
"""Name -> (method, settings on top of the preset's); what an operator sets goes on top of these.

AS1 to ASP: Table 3 of pFedGRP. ``pfedgrp-ddpm``: its second row in Tables 1 and 2, which needs the extra ``[ddpm]``.
``pfedgrp-pca`` and ``pfedgrp-mixture`` aren't in it: Gaussians in place of networks.
``pfedgrp-v1``: the paper's first version (its section 4); its lengths are in ``PAPER_LENGTHS``.
``agem-fedgp`` and the like: A-GEM, DER, FedCurv, FedProx "w/ FedGP" in FedGP's Tables 1 and 4; its "FedAvg w/ FedGP" is
``fedgp`` itself.
``derpp-fedgp`` and ``er-fedgp`` aren't in it: DER++ (of DER's paper) learns kept samples' labels too, experience replay
(Chaudhry et al. 2019) these alone.
``fedlwf-2t`` and ``fedprox-plus``: baselines of MFCL's Table 2.
``sdd-baseline`` to ``sdd-nagr``: the baseline and the halves of SDD in its Tables I to V, and the baseline with FedProx
and FedMax in its Table V. ``erdfr``: "ERDFR + FL" in its Tables I to III.
"""


PAPER_LENGTHS: dict[str, dict[str, Any]] = {
    "pfedgrp-v1": {"first_sub_generator_epochs": 1000, "sub_generator_epochs": 100},
}
"""What variants change at size ``paper`` only: schedules, which smaller presets shorten (first version, C.3, MNIST)."""


def resolved(name: str, preset: str) -> tuple[str, dict[str, str]]:
    """Return (method, overrides as ``--set`` would give them) of a variant at the size of a preset.

    A name that is no variant stands for itself.

    Raises:
        SettingsError: It is a variant of ours and a package's method: neither may hide the other.
    """
    owners = packages_with(METHODS_GROUP, name)
    if name in VARIANTS and owners:
        raise SettingsError(f"{name!r} is a variant of {VARIANTS[name][0]} and a method of {owners}; uninstall that")
    method, settings = VARIANTS.get(name, (name, {}))
    lengths = PAPER_LENGTHS.get(name, {}) if preset == "paper" else {}
    return method, {key: str(value) for key, value in {**settings, **lengths}.items()}
