"""Models of a megatron-core before 0.16 on a simulated NPU: what layers save rests on the host, or not.

Usage: megatron-npu sim -- python -m tests.adaptors.megatron_core.moved_activations_worker
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import launches

import megatron_npu

megatron_npu.install()

from megatron.core import distributed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

# It wants to be told of each gradient, also of those that a layer adds to their buffer itself.
distributed.DistributedDataParallelConfig = functools.partial(
    distributed.DistributedDataParallelConfig, overlap_grad_reduce=True
)


def step(modules: list[str]) -> dict:
    """Return losses of three steps of four layers, and peak and transfers of the last."""
    TransformerConfig.offload_modules, TransformerConfig.min_offloaded_tensor_size = modules, 1
    return launches.measure_option(launches.Option("llama", {}, {}, layers=4, sequence=512), launches.FUSED)


if __name__ == "__main__":
    every = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
    print(json.dumps([step(modules) for modules in ([], ["core_attn"], every)]))
