"""One file per federated continual-learning method; ``METHODS`` lists them.

Pure: no sockets, clocks, threads or paths.
"""

from __future__ import annotations

from typing import Any

from replayfleet.federation.methods.affcl import AFFCL
from replayfleet.federation.methods.agem import AGEM
from replayfleet.federation.methods.centralized import Centralized
from replayfleet.federation.methods.der import DER
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.fedavg_replay import FedAvgReplay
from replayfleet.federation.methods.fedcil import FedCIL
from replayfleet.federation.methods.fedem import FedEM
from replayfleet.federation.methods.fedgp import FedGP
from replayfleet.federation.methods.fedprox import FedProx
from replayfleet.federation.methods.ideal import Ideal
from replayfleet.federation.methods.lander import Lander
from replayfleet.federation.methods.mfcl import MFCL
from replayfleet.federation.methods.pfedgraph import PFedGraph
from replayfleet.federation.methods.pfedgraph_replay import PFedGraphReplay
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.target import Target

METHODS: dict[str, type[Any]] = {
    "affcl": AFFCL,
    "agem": AGEM,
    "centralized": Centralized,
    "der": DER,
    "fedavg": FedAvg,
    "fedavg-replay": FedAvgReplay,
    "fedcil": FedCIL,
    "fedem": FedEM,
    "fedgp": FedGP,
    "fedprox": FedProx,
    "ideal": Ideal,
    "lander": Lander,
    "mfcl": MFCL,
    "pfedgraph": PFedGraph,
    "pfedgraph-replay": PFedGraphReplay,
    "pfedgrp": PFedGRP,
    "target": Target,
}

__all__ = ["METHODS"]
