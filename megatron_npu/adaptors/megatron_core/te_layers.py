"""Attention under TransformerEngine's name, where ``MEGATRON_NPU_TE=local`` asks for its layers.

Connects ``extensions.transformer_engine``. All other classes there are upstream's own, around the modules of
``standins.transformer_engine``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import replace, te_layers_not_ours, wrap


@wrap(
    "megatron.core.extensions.transformer_engine:TEDotProductAttention",
    condition=te_layers_not_ours,
    why="it is made of TransformerEngine's kernels; megatron-core's own attention, which runs our operation, "
    "has the same meaning: masks, windows, packed sequences, context parallelism",
)
def attention_of_megatron_core(original: type) -> type:
    """Return megatron-core's attention with the arguments of upstream's ``TEDotProductAttention``.

    It has no state: what TransformerEngine's has in a checkpoint (scales of fp8) is not used.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class TEDotProductAttention(DotProductAttention):
        def __init__(
            self,
            *args: Any,
            num_splits: int | None = None,  # since 0.15, for flash-attn's kernel
            cp_comm_type: str | None = "p2p",
            **kwargs: Any,
        ) -> None:
            super().__init__(*args, cp_comm_type=cp_comm_type, **kwargs)
            self.window_size = _window(self)
            self._register_load_state_dict_pre_hook(_without_extra_state)

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | tuple[Tensor, Tensor] | None,
            *args: Any,
            num_splits: int | None = None,
            **kwargs: Any,
        ) -> Tensor:
            mask = _of_pairs(attention_mask) if isinstance(attention_mask, tuple) else attention_mask
            return super().forward(query, key, value, mask, *args, **kwargs)

    TEDotProductAttention.__doc__ = original.__doc__
    return TEDotProductAttention


@replace(
    "megatron.core.extensions.transformer_engine:TEFusedResidualRMSNorm.forward",
    versions=">=0.17",
    condition=te_layers_not_ours,
    why="it is a chain of TransformerEngine's fused operations; our norm takes the sum before it in as it is",
)
def normed_and_residual(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of ``[s, b, h]``, and it (--fused-residual-rmsnorm)."""
    from megatron_npu.standins.transformer_engine.norms import RMSNorm

    return RMSNorm.forward(self, hidden_states), hidden_states


def _window(attention: Any) -> tuple[int, int]:
    """Return the window as TransformerEngine writes it: -1 is no limit, and 0 after a causal query."""
    before, after = attention.layer_options.window
    open_end = 0 if "causal" in attention.attn_mask_type.name else -1
    return -1 if before is None else before, open_end if after is None else after


def _of_pairs(masks: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mask ``[b, 1, q, s]`` of padding among queries ``[b, 1, 1, q]`` and keys ``[b, 1, 1, s]``.

    Cross-attention of T5 is given the two; True is masked.
    """
    queries, keys = masks
    return torch.logical_or(queries.transpose(-1, -2), keys)


def _without_extra_state(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state_dict.pop(f"{prefix}_extra_state", None)
