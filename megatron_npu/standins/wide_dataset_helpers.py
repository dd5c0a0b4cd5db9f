"""Stub for ``megatron.data.helpers`` of Megatron-DeepSpeed 4efb479d, with 64-bit sample offsets."""

from __future__ import annotations

from megatron_npu.standins.dataset_helpers import (
    build_blending_indices,
    build_blocks_mapping,
    build_mapping,
)
from megatron_npu.standins.dataset_helpers import build_sample_idx_int64 as build_sample_idx

__all__ = ["build_blending_indices", "build_blocks_mapping", "build_mapping", "build_sample_idx"]
