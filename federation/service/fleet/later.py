"""Settings that methods got after the first runs were kept, with what was done before there were these."""

from __future__ import annotations

from collections.abc import Mapping

LATER_SETTINGS: Mapping[str, object] = {
    "replay_labels": "own",
    "replay": "terms",
    "targets": "met",
    "distance": "squared",
    "beta": 0.0,
    "passes": "joined",
    "replay_augmented": False,
    "robust": "none",
    "hostile_share": 0.2,
    "dp_noise_multiplier": 0.0,
    "dp_max_grad_norm": 1.0,
    "dp_delta": 1e-5,
    "dp_max_epsilon": 0.0,
    "pca_dims": 0,
    "pca_components": 4,
    "prox_mu": 0.01,
    "importance": 1.0,
    "fisher_batch_size": 32,
    "two_messages": False,
    "task_rounds": 1,
    "learning_rate_schedule": "constant",
    "teachers": "ensemble",
    "proximal_weight": 0.0,
    "activation_weight": 0.0,
    "session_learning_rate": 0.0,
    "samples_per_round": 0,
    "staleness_exponent": 0.0,
    "aggregation_neighbours": 0,
    "models_travel_as": "float32",
    "sub_generators_travel_as": "float32",
    "serve": "downloaded",
    "smooth_share": 0.0,
    "detail_share": 0.0,
    "upload_growth": 1.0,
}
"""The same for every method that has one: fleets, results and models of earlier versions lack it."""
