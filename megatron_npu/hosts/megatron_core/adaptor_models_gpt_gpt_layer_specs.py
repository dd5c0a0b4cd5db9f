"""``megatron.core.models.gpt.gpt_layer_specs``: the local spec, and a flag that stock scripts forget."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from megatron_npu.hosts.megatron_core.records import wrap


@wrap(
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec",
    versions=">=0.13",
    why="stock pretrain_gpt.py does not hand --qk-l2-norm to the local spec: it is ignored without a word",
)
def with_qk_l2_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Take the flag from the script's arguments where the caller is silent."""

    @functools.wraps(original)
    def get_gpt_layer_local_spec(*args: Any, **kwargs: Any) -> Any:
        if _flag_given():
            kwargs.setdefault("qk_l2_norm", True)
        return original(*args, **kwargs)

    return get_gpt_layer_local_spec


def _flag_given() -> bool:
    script = sys.modules.get("megatron.training.global_vars")  # absent where megatron-core is a library
    return getattr(getattr(script, "_GLOBAL_ARGS", None), "qk_l2_norm", False)
