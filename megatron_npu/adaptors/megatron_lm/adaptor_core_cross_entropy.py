"""``megatron.core.tensor_parallel.cross_entropy``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import replace
from megatron_npu.ops.cross_entropy import CrossEntropy

_TARGET = "megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy"
_WHY = "upstream holds an fp32 softmax of the whole logits from forward to backward; ours O(tokens)"


@replace(f"{_TARGET}.forward", why=_WHY)
def forward(ctx: Any, vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """``[s, b, v/p]`` logits and ``[s, b]`` targets to the ``[s, b]`` loss, fp32.

    Smoothing is spread over the whole vocabulary; upstream spreads it over each rank's part, so its loss
    depends on the parallel size.
    """
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    group, part = get_tensor_model_parallel_group(), vocab_parallel_logits.size(-1)
    start, size = group.rank() * part, group.size() * part
    logits = vocab_parallel_logits.contiguous()
    return CrossEntropy.forward(ctx, logits, target, start, size, group, label_smoothing)


@replace(f"{_TARGET}.backward", why=_WHY)
def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
    """Gradient of ``forward`` for the logits."""
    return CrossEntropy.backward(ctx, grad_output)[0], None, None
