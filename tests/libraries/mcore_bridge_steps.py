"""mcore-bridge, as its README uses it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config, set_random_seed
from megatron.core import parallel_state
from transformers import AutoConfig

STATE: dict[str, Any] = {}


def start(*, tensor: int, pipeline: int) -> None:
    """Make the groups."""
    torch.distributed.init_process_group(backend="nccl")
    parallel_state.initialize_model_parallel(tensor, pipeline)
    set_random_seed(42)


def load(path: Path, *, lora: bool, dtype: torch.dtype) -> tuple[list[Any], Any]:
    """Return the models on this rank and their config."""
    hf_config = AutoConfig.from_pretrained(path)
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    config = ModelConfig(
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        sequence_parallel=tensor > 1,
        **hf_to_mcore_config(hf_config),
    )
    models = get_mcore_model(config)
    config.bridge.load_weights(models, str(path))
    STATE.update(config=config, models=models, hf_config=hf_config)
    if lora:
        from peft import LoraConfig, get_peft_model

        # without a task: peft's class for CAUSAL_LM asks the config for a name that mcore-bridge's lacks
        STATE["lora"] = LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=0.0,
            target_modules=r".*\.(linear_fc1|linear_fc2|linear_qkv|linear_proj)$",
        )
        STATE["models"] = models = [get_peft_model(model, STATE["lora"]) for model in models]
    return models, config


def export(path: Path, _: Path) -> bool:
    """Write a Transformers model, or an adapter for one; return which."""
    lora = "lora" in STATE
    STATE["config"].bridge.save_weights(STATE["models"], str(path), peft_format=lora)
    if torch.distributed.get_rank() == 0 and lora:
        hf_lora = copy.copy(STATE["lora"])
        hf_lora.target_modules = r".*\.(gate|up|down|q|k|v|o)_proj$"
        hf_lora.save_pretrained(str(path))
    elif torch.distributed.get_rank() == 0:
        STATE["hf_config"].save_pretrained(path)
    return lora
