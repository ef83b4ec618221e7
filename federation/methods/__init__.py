"""One file per federated continual-learning method; ``METHODS`` lists them.

Pure: no sockets, clocks, threads or paths.
"""

from __future__ import annotations

from typing import Any

from federation.methods.affcl import AFFCL
from federation.methods.agem import AGEM
from federation.methods.centralized import Centralized
from federation.methods.der import DER
from federation.methods.fedavg import FedAvg
from federation.methods.fedavg_replay import FedAvgReplay
from federation.methods.fedcil import FedCIL
from federation.methods.fedem import FedEM
from federation.methods.fedgp import FedGP
from federation.methods.fedprox import FedProx
from federation.methods.ideal import Ideal
from federation.methods.lander import Lander
from federation.methods.mfcl import MFCL
from federation.methods.pfedgraph import PFedGraph
from federation.methods.pfedgraph_replay import PFedGraphReplay
from federation.methods.pfedgrp import PFedGRP
from federation.methods.target import Target

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
