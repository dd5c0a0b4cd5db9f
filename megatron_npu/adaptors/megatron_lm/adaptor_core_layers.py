"""``megatron.core.tensor_parallel.layers``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import replace, wrap
from megatron_npu.ops.embedding import vocab_parallel_embedding


@replace(
    "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
    why="upstream indexes with boolean masks, whose size the host has to wait for on npu and cuda, and torch "
    "sums the gradients of a frequent token in 16 bits on the cpu",
)
def forward(self: Any, input_: Tensor) -> Tensor:
    """``[...]`` token ids to ``[..., h]``, summed over the tensor-parallel group."""
    from megatron.core.tensor_parallel.layers import reduce_from_tensor_model_parallel_region

    start, end = self.vocab_start_index, self.vocab_end_index
    split = self.tensor_model_parallel_size > 1
    part = vocab_parallel_embedding(input_, self.weight, start, end, split=split)
    return reduce_from_tensor_model_parallel_region(part)


@wrap(
    "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
    why="it takes a view of the gradient, which fused attention leaves in its own order of dimensions (the "
    "query of cross-attention)",
)
def with_contiguous_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Bring the gradient into the order of the output first."""

    @functools.wraps(original)
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return original(ctx, grad_output.contiguous())

    return backward
