"""What ``tools/checkpoint_util.py`` calls, and does not find at this commit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_npu.adaptors.megatron_lm.decorators import wrap


@wrap(
    "megatron.checkpointing:load_args_from_checkpoint",
    why="tools/checkpoint_util.py calls it, and then mpu.parallel_state.set_...: at this commit mpu is "
    "parallel_state itself",
)
def name_parallel_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``mpu.parallel_state`` be ``mpu`` for the tool that asks for it next."""

    @functools.wraps(original)
    def load_args_from_checkpoint(*args: Any, **kwargs: Any) -> Any:
        from megatron.core import mpu

        mpu.parallel_state = mpu
        return original(*args, **kwargs)

    return load_args_from_checkpoint


@wrap(
    "megatron.core.parallel_state:get_data_parallel_group",
    why="every transformer asks for the group, for fp8 alone; tools/checkpoint_util.py builds models in a "
    "process without groups, and fails",
)
def none_without_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return None where torch.distributed is not initialised, as a group of this process alone."""

    @functools.wraps(original)
    def get_data_parallel_group() -> Any:
        return original() if torch.distributed.is_initialized() else None

    return get_data_parallel_group
