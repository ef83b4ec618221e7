"""What GPU providers are asked for, word by word: neither CUDA nor TensorRT is at hand to say what they make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from replayfleet.export.running.provider_options import BatchProfile, cuda_options, tensorrt_options


def test_cuda_keeps_every_bit_of_the_mantissa_and_doesnt_spend_seconds_on_a_new_model():
    assert cuda_options() == {
        "device_id": "0",
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "do_copy_in_default_stream": "True",
        "use_tf32": "False",
    }


def test_tensorrt_is_given_its_own_folders_explicit_batches_and_a_cap_and_no_precision():
    profile = BatchProfile(1, 8, 64)
    inputs = {"images": (3, 32, 32)}
    assert tensorrt_options(Path("/e/engine"), Path("/e/timing"), inputs, profile) == {
        "device_id": "0",
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": "/e/engine",
        "trt_engine_cache_prefix": "engine",
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": "/e/timing",
        "trt_max_workspace_size": str(256 << 20),
        "trt_profile_min_shapes": "images:1x3x32x32",
        "trt_profile_opt_shapes": "images:8x3x32x32",
        "trt_profile_max_shapes": "images:64x3x32x32",
    }


@pytest.mark.parametrize("sizes", [(0, 1, 1), (2, 1, 4), (1, 5, 4)])
def test_impossible_batches_are_refused(sizes: tuple[int, int, int]):
    with pytest.raises(ValueError, match="expected 1 <= low <= best <= high"):
        BatchProfile(*sizes)
