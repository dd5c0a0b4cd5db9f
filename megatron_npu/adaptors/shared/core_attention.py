"""What the core attention of both Megatrons has in common."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from megatron_npu.ops import softmax
from megatron_npu.ops.attention import attention


def attend(query: Tensor, key: Tensor, value: Tensor, *, shape_order: str, **kwargs: Any) -> Tensor:
    """Return the contiguous attention ``[sq, b, n, d]`` of a query ``[sq, b, n, d]`` to ``[sk, b, n, d]``.

    Args:
        shape_order: ``--shape-order``, the layout that the operation is given: ``SBH`` or ``BSH``. The heads
            stay a dimension of their own: SBH and SBND are the same memory.
        kwargs: of ``ops.attention.attention``.
    """
    if shape_order == "SBH":
        return attention(query, key, value, layout="SBND", **kwargs).contiguous()
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return attention(query, key, value, layout="BSND", **kwargs).transpose(0, 1).contiguous()


def dropout_generator(dropout_p: float, sequence_parallel: bool) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which upstream drops out: heads are split, so each rank has its own masks.

    Args:
        sequence_parallel: then the whole layer is in such a context.
    """
    if dropout_p == 0.0 or sequence_parallel:
        return contextlib.nullcontext()
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker().fork()


def forward_fused_softmax(self: Any, input: Tensor, mask: Tensor | None) -> Tensor:
    """``[b, n, sq, sk]`` scores to probabilities of the same shape and dtype: ``FusedScaleMaskSoftmax``'s.

    A causal mask that forbids more than the future (``--reset-attention-mask``) counts; the causal kernel of
    Megatron-LM 285068c8 ignores it.
    """
    causal = self.attn_mask_type.name == "causal"
    return softmax.scale_mask_softmax(input, mask, self.scale, causal)
