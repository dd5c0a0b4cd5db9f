"""Support batches of packed sequences under context parallelism.

Patches ``utils``, ``datasets.data_schedule`` and ``packed_seq_params`` of ``megatron.core``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around, transformer_engine_present
from megatron_npu.ops.attention.context_parallel.packed import token_indices

_WHOLE = {"attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"}  # what upstream does not cut


@around(
    "megatron.core.utils:get_thd_batch_on_this_cp_rank",
    versions=">=0.16,<0.18",
    condition=transformer_engine_present,
    why="upstream asks TransformerEngine which tokens of packed sequences a context-parallel rank has",
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
    """Reduce a batch of ``[1, t]`` tensors to this rank's tokens, after upstream has described the whole
    batch.
    """
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


@around(
    "megatron.core.datasets.data_schedule:HybridCPDataLoaderWrapper.__next__",
    versions=">=0.18",
    upstream_bug=True,
    why="--hybrid-context-parallel raises an IndexError in the first forward: since 0.18 core/utils.py "
    "expects two dimensions and sequence bounds, but the loader provides one dimension and no bounds",
    until=NOT_FIXED,
)
def describe_dealt_out_sequences(original: Callable[[Any], tuple[Any, Any]], self: Any) -> tuple[Any, Any]:
    """Reshape each sequence ``[s]`` to a batch ``[1, s]`` with boundaries that describe a single sequence."""
    samples, groups = original(self)
    for sample in (samples or {}).values():
        for name, values in sample.items():
            sample[name] = values.unsqueeze(0)
        device, length = sample["tokens"].device, sample["tokens"].size(1)
        sample["cu_seqlens"] = torch.tensor([[0, length]], dtype=torch.int32, device=device)
        sample["max_seqlen"] = torch.tensor([length], dtype=torch.int32, device=device)
    return samples, groups


@around(
    "megatron.core.packed_seq_params:PackedSeqParams.__post_init__",
    versions=">=0.18",
    upstream_bug=True,
    why="--hybrid-context-parallel raises a RuntimeError of torch.split in the first forward: since 0.18 "
    "its sequences count as packed, and rotary embedding splits those over the ranks of "
    "--context-parallel-size",
    until=NOT_FIXED,
)
def take_one_sequence_as_whole(original: Callable[[Any], None], self: Any) -> None:
    """Mark a sequence that is stored completely on one rank as ``sbhd``, as 0.16 and 0.17 do.

    Other sequences stay packed.
    """
    original(self)
    if self.qkv_format == "thd" and self.local_cp_size is not None and self.cu_seqlens_q.numel() == 2:
        self.qkv_format = "sbhd"
