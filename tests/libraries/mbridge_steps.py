"""mbridge, as its README uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mbridge import AutoBridge
from megatron.core import parallel_state, tensor_parallel

STATE: dict[str, Any] = {}


def start(*, tensor: int, pipeline: int) -> None:
    """Make the groups."""
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor, pipeline)
    tensor_parallel.model_parallel_cuda_manual_seed(42)


def load(path: Path, *, lora: bool, dtype: torch.dtype) -> tuple[list[Any], Any]:
    """Return the models on this rank and their config."""
    assert not lora, "mbridge offers none"
    bridge = AutoBridge.from_pretrained(str(path), dtype=dtype)
    models = bridge.get_model(bf16=dtype == torch.bfloat16)
    bridge.load_weights(models, str(path))
    STATE.update(bridge=bridge, models=models)
    return models, bridge.config


def export(path: Path, _: Path) -> bool:
    """Write a Transformers model; return that it is no adapter."""
    STATE["bridge"].save_weights(STATE["models"], str(path))
    return False
