"""A batch of packed sequences under context parallelism: connects ``megatron.core.utils``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import around, transformer_engine_present
from megatron_npu.ops.attention.context_parallel.packed import token_indices

_WHOLE = {"attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"}  # what upstream does not cut


@around(
    "megatron.core.utils:get_thd_batch_on_this_cp_rank",
    versions=">=0.16,<0.18",
    condition=transformer_engine_present,
    why="it asks TransformerEngine which tokens of packed sequences a context-parallel rank has",
)
def cut_packed_batch(
    original: Callable[..., tuple[dict[str, Any], Any]],
    batch: dict[str, Any],
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    max_seqlen: Tensor,
    cp_size: int | None = None,
    cp_rank: int | None = None,
) -> tuple[dict[str, Any], Any]:
    """Let upstream describe the whole batch of ``[1, t]`` tensors, and cut it here to this rank's tokens."""
    from megatron.core import parallel_state

    size = parallel_state.get_context_parallel_world_size() if cp_size is None else cp_size
    rank = parallel_state.get_context_parallel_rank() if cp_rank is None else cp_rank
    batch, params = original(batch, cu_seqlens, cu_seqlens_padded, max_seqlen, cp_size=1, cp_rank=0)
    if size > 1:
        bounds = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
        index = token_indices(bounds.flatten().tolist(), size, rank)
        for name in batch.keys() - _WHOLE:
            batch[name] = batch[name].index_select(1, index.to(batch[name].device))
    return batch, params
