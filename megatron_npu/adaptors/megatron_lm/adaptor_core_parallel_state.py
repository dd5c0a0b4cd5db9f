"""``megatron.core.parallel_state``: models that ``tools/checkpoint_util.py`` builds without groups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_npu.adaptors.megatron_lm.decorators import wrap


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
