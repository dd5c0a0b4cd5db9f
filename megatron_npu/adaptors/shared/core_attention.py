"""The core attention of both Megatrons: what they have in common."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from megatron_npu.ops.attention import attention


def attend(query: Tensor, key: Tensor, value: Tensor, *, shape_order: str, **kwargs: Any) -> Tensor:
    """Hand ``[s, b, n, d]`` tensors over as ``--shape-order`` asks for; answer alike, contiguous.

    The heads stay a dimension of their own: SBH and SBND are the same memory.
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
