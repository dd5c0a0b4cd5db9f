"""Megatron-Bridge, as its README uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from transformers import AutoConfig

STATE: dict[str, Any] = {}


def start(*, tensor: int, pipeline: int) -> None:
    """Leave the groups to the library."""
    STATE.update(tensor=tensor, pipeline=pipeline)


def load(path: Path, *, lora: bool, dtype: torch.dtype) -> tuple[list[Any], Any]:
    """Return the models on this rank and their config."""
    bridge = AutoBridge.from_hf_pretrained(str(path), torch_dtype=dtype)
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = STATE["tensor"]
    provider.pipeline_model_parallel_size = STATE["pipeline"]
    provider.sequence_parallel = STATE["tensor"] > 1
    provider.gradient_accumulation_fusion = False
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16, provider.fp16 = dtype == torch.bfloat16, False
    provider.finalize()
    provider.initialize_model_parallel(seed=42)
    if lora:
        from megatron.bridge.peft.lora import LoRA

        adapter = LoRA(dim=4, alpha=8)
        provider.register_pre_wrap_hook(lambda chunks: adapter(chunks, training=True))
    models = provider.provide_distributed_model(wrap_with_ddp=False)
    STATE.update(bridge=bridge, models=models)
    return models, provider


def export(path: Path, model: Path) -> bool:
    """Write a Transformers model, into which an adapter is merged; return that it is none itself."""
    STATE["bridge"].save_hf_weights(STATE["models"], path, show_progress=False)
    if torch.distributed.get_rank() == 0:
        AutoConfig.from_pretrained(model).save_pretrained(path)
    return False
