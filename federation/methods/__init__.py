"""One file per federated continual-learning method; ``METHODS`` lists them.

Pure: no sockets, clocks, threads or paths.
"""

from __future__ import annotations

from typing import Any

from federation.methods.affcl import AFFCL
from federation.methods.centralized import Centralized
from federation.methods.fedavg import FedAvg
from federation.methods.fedavg_replay import FedAvgReplay
from federation.methods.fedcil import FedCIL
from federation.methods.fedem import FedEM
from federation.methods.fedprox import FedProx
from federation.methods.lander import Lander
from federation.methods.mfcl import MFCL
from federation.methods.pfedgraph import PFedGraph
from federation.methods.pfedgraph_replay import PFedGraphReplay
from federation.methods.pfedgrp import PFedGRP
from federation.methods.target import Target

METHODS: dict[str, type[Any]] = {
    "affcl": AFFCL,
    "centralized": Centralized,
    "fedavg": FedAvg,
    "fedavg-replay": FedAvgReplay,
    "fedcil": FedCIL,
    "fedem": FedEM,
    "fedprox": FedProx,
    "lander": Lander,
    "mfcl": MFCL,
    "pfedgraph": PFedGraph,
    "pfedgraph-replay": PFedGraphReplay,
    "pfedgrp": PFedGRP,
    "target": Target,
}

__all__ = ["METHODS"]
