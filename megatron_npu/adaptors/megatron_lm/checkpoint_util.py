"""Provide functions that ``tools/checkpoint_util.py`` calls but that are missing in this commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_npu.adaptors.megatron_lm.decorators import around


@around(
    "megatron.checkpointing:load_args_from_checkpoint",
    why=(
        "tools/checkpoint_util.py calls this function and then mpu.parallel_state.set_..., but at this "
        "commit mpu is parallel_state itself"
    ),
    upstream_bug=True,
    until="the tool calls mpu.set_... (fixed by megatron-core 0.12); 285068c8 is frozen",
)
def name_parallel_state(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Set ``mpu.parallel_state`` to ``mpu``, as the tool expects."""
    from megatron.core import mpu

    mpu.parallel_state = mpu
    return original(*args, **kwargs)


@around(
    "megatron.core.parallel_state:get_data_parallel_group",
    why="every transformer requests the group, which only fp8 needs; tools/checkpoint_util.py builds models "
    "in a process without groups and fails",
    upstream_bug=True,
    until="transformers request a group only with fp8 (fixed by megatron-core 0.12); 285068c8 is frozen",
)
def none_without_groups(original: Callable[..., Any]) -> Any:
    """Return None, which means a group with only this process, if torch.distributed is not initialized."""
    return original() if torch.distributed.is_initialized() else None
