"""Models of a megatron-core before 0.16 on a simulated NPU: what layers save rests on the host, or not.

Usage: megatron-npu sim -- python -m tests.adaptors.megatron_core.moved_activations_worker
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import launches
import torch

import megatron_npu

megatron_npu.install()

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_npu.sim import counting  # noqa: E402


def step(modules: list[str]) -> dict:
    """Return losses of three steps of four layers, and peak and transfers of the last."""
    TransformerConfig.offload_modules, TransformerConfig.min_offloaded_tensor_size = modules, 1
    torch.manual_seed(1)
    training = launches.prepare_megatron_core("llama", 4, 512, **launches.FUSED)
    losses = []
    for _ in range(3):
        for forget in training.forget:
            forget()
        with counting() as counts:
            loss = training.loss()
            loss.backward()
        training.reduce()
        training.update()
        losses.append(loss.item())
    return {"losses": losses, "peak": counts.peak, "moved": counts.transfers.bytes}


if __name__ == "__main__":
    every = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
    print(json.dumps([step(modules) for modules in ([], ["core_attn"], every)]))
