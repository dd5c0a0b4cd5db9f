"""Train Transformers models and custom models, using acceleration switches and templates.

User scripts import the names below from this package or, when run by ``megatron-npu train``, from
``rapidformer``. The names are imported lazily, so that printing a help text does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_npu.finetune.data.mmap_datasets import (
        build_train_valid_test_datasets,
        build_train_valid_test_datasets_for_huggingface,
    )
    from megatron_npu.finetune.rapidformer.engine import RapidformerEngine
    from megatron_npu.finetune.rapidformer.megatron_scripts import (
        get_ltor_masks_and_position_ids,
        get_tokenizer,
        megatron_config,
        megatron_gpt,
    )
    from megatron_npu.finetune.rapidformer.script_metrics import load_metric
    from megatron_npu.finetune.rapidformer.state import get_args, get_logger, get_timers
    from megatron_npu.finetune.rapidformer.templates import Finetuner, PreTrainer, Pretrainer

__all__ = [
    "Finetuner",
    "PreTrainer",
    "Pretrainer",
    "RapidformerEngine",
    "build_train_valid_test_datasets",
    "build_train_valid_test_datasets_for_huggingface",
    "get_args",
    "get_logger",
    "get_ltor_masks_and_position_ids",
    "get_timers",
    "get_tokenizer",
    "load_metric",
    "megatron_config",
    "megatron_gpt",
]

_PLACES = {
    "Finetuner": "rapidformer.templates",
    "PreTrainer": "rapidformer.templates",
    "Pretrainer": "rapidformer.templates",
    "RapidformerEngine": "rapidformer.engine",
    "build_train_valid_test_datasets": "data.mmap_datasets",
    "build_train_valid_test_datasets_for_huggingface": "data.mmap_datasets",
    "get_args": "rapidformer.state",
    "get_logger": "rapidformer.state",
    "get_ltor_masks_and_position_ids": "rapidformer.megatron_scripts",
    "get_timers": "rapidformer.state",
    "get_tokenizer": "rapidformer.megatron_scripts",
    "load_metric": "rapidformer.script_metrics",
    "megatron_config": "rapidformer.megatron_scripts",
    "megatron_gpt": "rapidformer.megatron_scripts",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
