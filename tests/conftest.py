"""Settings for all tests: one thread per process, so that a busy machine slows tests down in proportion and no more."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from federation.service.torch_setup import prepare_torch

prepare_torch(1)
