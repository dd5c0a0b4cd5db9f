"""Stub for ``transformer_engine_torch``, the compiled part of TransformerEngine, which contains one function.

The function determines the tokens of packed sequences that a context-parallel rank holds. LLaVA, Mamba layers
and the batches of the scripts call it.
"""

from __future__ import annotations

from torch import Tensor

from megatron_npu.ops.attention.context_parallel.packed import token_indices


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Return the positions of a rank's tokens, ``[total_tokens / world_size]``, in ascending order.

    Args:
        cu_seqlens: where sequences begin and end, ``[sequences + 1]``; each sequence has 2 * ``world_size``
            parts, and rank r holds part r counted from the front and part r counted from the back.
        total_tokens: the number of tokens of all sequences.
        world_size, rank: the size of the context-parallel group, and the rank in it.

    Raises:
        ValueError: the sequences have another number of tokens.
    """
    bounds = cu_seqlens.flatten().tolist()
    if bounds[-1] != total_tokens:
        raise ValueError(
            f"the sequences must end at {total_tokens}, the number of tokens, but they end at {bounds[-1]}"
        )
    return token_indices(bounds, world_size, rank).to(cu_seqlens.device)
