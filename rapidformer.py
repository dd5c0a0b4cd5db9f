"""The names that the document's scripts import (PAI-Rapidformer): those of ``megatron_npu.finetune``.

Scripts are started with ``megatron-npu train --user-script FILE`` (also ``rapidformer --user-script FILE``),
which reads the flags and starts the ranks; elsewhere the names are there to be read, completed and checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_npu.finetune import (
        Finetuner,
        PreTrainer,
        Pretrainer,
        RapidformerEngine,
        build_train_valid_test_datasets,
        build_train_valid_test_datasets_for_huggingface,
        get_args,
        get_logger,
        get_ltor_masks_and_position_ids,
        get_timers,
        get_tokenizer,
        load_metric,
        megatron_config,
        megatron_gpt,
    )

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_npu import finetune

    return getattr(finetune, name)
