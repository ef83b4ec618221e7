"""One file per federated continual-learning method; ``METHODS`` lists them.

``ALL_METHODS`` knows those of other packages too (``federation.extensions``), and is where a name is looked up.
Pure: no sockets, clocks, threads or paths.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import msgspec

from replayfleet.federation.extensions import METHODS_GROUP, STORING_METHODS, Extended, added
from replayfleet.federation.methods.affcl import AFFCL
from replayfleet.federation.methods.agem import AGEM
from replayfleet.federation.methods.centralized import Centralized
from replayfleet.federation.methods.der import DER
from replayfleet.federation.methods.ewc import EWC
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.fedavg_replay import FedAvgReplay
from replayfleet.federation.methods.fedcil import FedCIL
from replayfleet.federation.methods.fedcurv import FedCurv
from replayfleet.federation.methods.fedem import FedEM
from replayfleet.federation.methods.fedgp import FedGP
from replayfleet.federation.methods.fedprox import FedProx
from replayfleet.federation.methods.icarl import ICaRL
from replayfleet.federation.methods.ideal import Ideal
from replayfleet.federation.methods.kit.records import Method
from replayfleet.federation.methods.lander import Lander
from replayfleet.federation.methods.lwf import LwF
from replayfleet.federation.methods.mfcl import MFCL
from replayfleet.federation.methods.pfedgraph import PFedGraph
from replayfleet.federation.methods.pfedgraph_replay import PFedGraphReplay
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.pfedgrp_plus import PFedGRPPlus
from replayfleet.federation.methods.sdd import SDD
from replayfleet.federation.methods.target import Target

METHODS: dict[str, type[Any]] = {
    "affcl": AFFCL,
    "agem": AGEM,
    "centralized": Centralized,
    "der": DER,
    "ewc": EWC,
    "fedavg": FedAvg,
    "fedavg-replay": FedAvgReplay,
    "fedcil": FedCIL,
    "fedcurv": FedCurv,
    "fedem": FedEM,
    "fedgp": FedGP,
    "fedprox": FedProx,
    "icarl": ICaRL,
    "ideal": Ideal,
    "lander": Lander,
    "lwf": LwF,
    "mfcl": MFCL,
    "pfedgraph": PFedGraph,
    "pfedgraph-replay": PFedGraphReplay,
    "pfedgrp": PFedGRP,
    "pfedgrp-plus": PFedGRPPlus,
    "sdd": SDD,
    "target": Target,
}


def _fault(name: str, kind: Any) -> str:
    """Return why something can't be the method of this name, or ""."""
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return f"{kind!r} is no dataclass; expected a class as replayfleet.federation.methods.kit.records.Method says"
    wanted = [each for each in (*vars(Method), *Method.__annotations__) if not each.startswith("_")]
    missing = [each for each in wanted if not hasattr(kind, each)]
    if missing:
        return f"{kind.__name__} has no {', '.join(missing)}; inherit from TaskMethod, or write all of Method"
    of_class: Any = kind
    if of_class.name != name:
        return f"the name in {kind.__name__} is {of_class.name!r}"
    if of_class.stores_data != (name in added(STORING_METHODS)):
        return f"stores_data is {of_class.stores_data}; the group {STORING_METHODS} has exactly those where it is True"
    return _fault_of_settings(kind)


def _fault_of_settings(kind: Any) -> str:
    """Return why a method's settings can't be read, converted or written down, or ""."""
    try:
        typing.get_type_hints(kind)
    except Exception as error:  # whatever the annotation says
        return f"an annotation of {kind.__name__} can't be resolved where methods are read ({error})"
    try:
        msgspec.json.encode(
            [each.default for each in dataclasses.fields(kind) if each.default is not dataclasses.MISSING]
        )
    except (TypeError, ValueError) as error:
        return f"JSON can't hold a default of its settings ({error})"
    return ""


ALL_METHODS: Extended[type[Any]] = Extended(METHODS_GROUP, "method", METHODS, _fault)
"""``METHODS``, and those of other packages, which are imported when they are used."""

__all__ = ["ALL_METHODS", "METHODS"]
