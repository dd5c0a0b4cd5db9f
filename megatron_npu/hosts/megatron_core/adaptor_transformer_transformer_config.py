"""``megatron.core.transformer.transformer_config``: fusions that TransformerEngine brings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_npu.hosts.megatron_core.records import transformer_engine_present, wrap
from megatron_npu.ops import dispatch

# moe_router_fusion is there since 0.14.
_FUSIONS = ("moe_permute_fusion", "moe_router_fusion")


@wrap(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    condition=transformer_engine_present,
    why="--moe-permute-fusion and --moe-router-fusion end in an ImportError without TransformerEngine",
)
def without_fusions_of_experts(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Switch them off, which is said; upstream's own unfused functions compute the same."""

    @functools.wraps(original)
    def check(self: Any) -> None:
        for option in _FUSIONS:
            if getattr(self, option, False):
                dispatch.report_refusal(option, "TransformerEngine is not installed")
                setattr(self, option, False)
        original(self)

    return check
