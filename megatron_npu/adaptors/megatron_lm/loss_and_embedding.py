"""Vocabulary-parallel cross-entropy and embedding, and the logits between the model and its loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import replace
from megatron_npu.ops.cross_entropy import CrossEntropy
from megatron_npu.ops.embedding import vocab_parallel_embedding


@replace(
    "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
    why="upstream indexes with boolean masks, whose size the host has to wait for on npu and cuda, and torch "
    "sums the gradients of a frequent token in 16 bits on the cpu",
)
def embedding_forward(self: Any, input_: Tensor) -> Tensor:
    """``[...]`` token ids to ``[..., h]``, summed over the tensor-parallel group."""
    from megatron.core.tensor_parallel.layers import reduce_from_tensor_model_parallel_region

    start, end = self.vocab_start_index, self.vocab_end_index
    split = self.tensor_model_parallel_size > 1
    part = vocab_parallel_embedding(input_, self.weight, start, end, split=split)
    return reduce_from_tensor_model_parallel_region(part)


_TARGET = "megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy"
_WHY = "upstream holds an fp32 softmax of the whole logits from forward to backward; ours O(tokens)"


@replace(f"{_TARGET}.forward", why=_WHY)
def cross_entropy_forward(
    ctx: Any, vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
) -> Tensor:
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
def cross_entropy_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
    """Gradient of ``forward`` for the logits."""
    return CrossEntropy.backward(ctx, grad_output)[0], None, None


@replace(
    "megatron.model.gpt_model:post_language_model_processing",
    why="upstream copies 16-bit logits to fp32, and their gradient back; our cross-entropy needs neither",
)
def post_language_model_processing(
    lm_output: Tensor,
    labels: Tensor | None,
    logit_weights: Tensor,
    parallel_output: bool,
    fp16_lm_cross_entropy: bool,
) -> Tensor:
    """``[s, b, h]`` and ``[b, s]`` labels to the ``[b, s]`` loss, fp32; no labels: to logits ``[b, s, v]``.

    The numbers are upstream's without ``fp16_lm_cross_entropy``, which there is no reason to set here.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.model.gpt_model import parallel_lm_logits

    logits = parallel_lm_logits(lm_output, logit_weights, parallel_output)
    if labels is None:
        return logits.transpose(0, 1).contiguous()
    return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t().contiguous()
