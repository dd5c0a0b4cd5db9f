"""Fix the gradients of multi-latent attention on tensor-parallel ranks.

Patches ``megatron.core.transformer.multi_latent_attention`` and ``distributed.finalize_model_grads``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around


class _SharedByAllHeads(torch.autograd.Function):
    """The keys of a rank's attention heads, whose last columns are the same for all heads on all ranks.

    The backward pass returns gradients of these columns whose sum over the rank's heads is that of all ranks.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, columns: int, group: dist.ProcessGroup) -> Tensor:
        """Return a view of ``key``, ``[..., heads, d]``."""
        ctx.columns, ctx.group = columns, group
        return key.view_as(key)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        own, shared = gradient.split([gradient.size(-1) - ctx.columns, ctx.columns], -1)
        total = shared.sum(-2, keepdim=True)
        dist.all_reduce(total, group=ctx.group)
        return torch.cat([own, (total / shared.size(-2)).expand_as(shared)], -1), None, None


@around(
    "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors",
    why="all heads share the rotary part of a key, but its gradient is summed over the heads of one "
    "tensor-parallel rank only, except with TransformerEngine's layers and sequence parallelism",
    until="not fixed up to 0.19.2: #1699",
    upstream_bug=True,
)
def sum_gradients_of_the_shared_key(
    original: Callable[..., tuple[Tensor, ...]], self: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Call upstream's function, and return its queries, keys and values, with the keys as ``[..., heads,
    d]``.
    """
    from megatron.core import parallel_state

    query, key, *rest = original(self, *args, **kwargs)
    group = getattr(self, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()
    config = self.config
    # a whole layer on each rank: upstream's gather of a parallel sequence sums when it goes back
    whole = (
        self.linear_kv_down_proj.weight.size(0) == config.kv_lora_rank + config.qk_pos_emb_head_dim
        and config.sequence_parallel
    )
    if key.requires_grad and not whole and dist.get_world_size(group) > 1:
        key = _SharedByAllHeads.apply(key, config.qk_pos_emb_head_dim, group)
    return query, key, *rest


_around_reduction = partial(
    around,
    why="with --qk-layernorm and tensor parallelism, but without sequence parallelism, the gradient of "
    "multi-latent attention's query norm, which every rank already has in full, is multiplied by the "
    "number of ranks",
    until=NOT_FIXED,
    upstream_bug=True,
)


@_around_reduction(
    "megatron.core.distributed.finalize_model_grads:_allreduce_layernorm_grads", versions="<0.13"
)
@_around_reduction(
    "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
    versions=">=0.13",
)
def leave_norms_of_latents(
    original: Callable[..., None], model: list[torch.nn.Module], config: Any, *args: Any, **kwargs: Any
) -> None:
    """Hide ``qk_layernorm`` from upstream, which would otherwise assume that the norms of latents process
    single heads.
    """
    if getattr(config, "multi_latent_attention", False) and not config.sequence_parallel:
        config = copy.copy(config)
        config.qk_layernorm = False
    original(model, config, *args, **kwargs)
