"""Define example calls of attention that ``megatron-npu doctor`` checks."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.attention import attention
from megatron_npu.ops.attention.block import Residuals, attention_block, attention_block_backward
from megatron_npu.ops.attention.reference import operation
from megatron_npu.ops.attention.sink import operation as operation_with_sink
from megatron_npu.ops.attention.spec import AttentionSpec, dense_segments
from megatron_npu.ops.dispatch import Make


@operation.example("causal")
def _causal(make: Make) -> Tensor:
    query, key, value = (make(64, 2, heads, 64) for heads in (4, 2, 2))
    return attention(query, key, value, layout="SBND", scale=0.125, causal=True)


@operation.example("window")
def _window(make: Make) -> Tensor:
    query, key, value = (make(64, 2, 4, 64) for _ in range(3))
    return attention(query, key, value, layout="SBND", scale=0.125, causal=True, window=(16, 0))


@attention_block.example()  # and of its backward, which is an operation of its own
def _block(make: Make) -> None:
    query, key, value = (make(64, 2, heads, 64).detach() for heads in (4, 2, 2))
    spec = AttentionSpec("SBND", 4, 2, 0.125, dense_segments(64, 64, True, (None, None), 0))
    output, lse, drawn = attention_block(query, key, value, spec)
    residuals = Residuals(query, key, value, output, lse)
    attention_block_backward(torch.ones_like(output), residuals, spec, drawn)


@operation_with_sink.example()
def _sink(make: Make) -> Tensor:
    query, key, value = (make(64, 2, heads, 64) for heads in (4, 2, 2))
    return attention(query, key, value, layout="SBND", scale=0.125, causal=True, sink=make(4))
