"""Patch the vocabulary-parallel cross-entropy and embedding, and the loss computed from the model's
output.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_npu import devices
from megatron_npu.adaptors.megatron_lm.decorators import replace
from megatron_npu.adaptors.shared import gradients
from megatron_npu.adaptors.shared.layers.output_layer import loss_of_factors
from megatron_npu.ops.cross_entropy import CrossEntropy
from megatron_npu.ops.embedding import vocab_parallel_embedding


@replace(
    "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
    why="upstream indexes with boolean masks, whose size the host has to wait for on npu and cuda, and torch "
    "sums the gradients of a frequent token in 16 bits on the cpu",
)
def embedding_forward(self: Any, input_: Tensor) -> Tensor:
    """Look up embeddings: map token ids ``[...]`` to ``[..., h]``, summed over the tensor-parallel group."""
    from megatron.core.tensor_parallel.layers import reduce_from_tensor_model_parallel_region

    start, end = self.vocab_start_index, self.vocab_end_index
    split = self.tensor_model_parallel_size > 1
    part = vocab_parallel_embedding(
        input_, self.weight, start, end, split=split, keep_rows=gradients.keep_rows
    )
    return reduce_from_tensor_model_parallel_region(part)


_TARGET = "megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy"
_WHY = "upstream keeps an fp32 softmax of all logits from forward to backward; ours keeps O(tokens)"


@replace(f"{_TARGET}.forward", why=_WHY)
def cross_entropy_forward(
    ctx: Any, vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Compute the loss ``[s, b]`` in fp32 from logits ``[s, b, v/p]`` and targets ``[s, b]``.

    Label smoothing is applied over the whole vocabulary. Upstream applies it over each rank's part, so its
    loss depends on the parallel size.
    """
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    group, part = get_tensor_model_parallel_group(), vocab_parallel_logits.size(-1)
    start, size = group.rank() * part, group.size() * part
    logits = vocab_parallel_logits.contiguous()
    return CrossEntropy.forward(ctx, logits, target, start, size, group, label_smoothing)


@replace(f"{_TARGET}.backward", why=_WHY)
def cross_entropy_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
    """Return the gradient of the loss with respect to the logits."""
    return CrossEntropy.backward(ctx, grad_output)[0], None, None


@replace(
    "megatron.model.gpt_model:post_language_model_processing",
    why="upstream copies 16-bit logits to fp32, and their gradient back; our cross-entropy needs neither, "
    "and on a cpu or with --cross-entropy-fusion-impl linear not even the logits",
)
def post_language_model_processing(
    lm_output: Tensor,
    labels: Tensor | None,
    logit_weights: Tensor,
    parallel_output: bool,
    fp16_lm_cross_entropy: bool,
) -> Tensor:
    """Return the loss ``[b, s]`` in fp32, computed from hidden states ``[s, b, h]`` and labels.

    Without labels, return logits ``[b, s, v]``.

    The results are those of upstream without ``fp16_lm_cross_entropy``, which there is no reason to set here.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.model.gpt_model import parallel_lm_logits

    if labels is not None and parallel_output and _without_logits():
        return _loss_of_factors(lm_output, labels, logit_weights)
    logits = parallel_lm_logits(lm_output, logit_weights, parallel_output)
    if labels is None:
        return logits.transpose(0, 1).contiguous()
    return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t().contiguous()


def _without_logits() -> bool:
    """Return True if the output layer and the loss are fused.

    On a cpu, they are always fused.
    """
    return _asks_for_linear() or devices.current().name == "cpu"


def _asks_for_linear() -> bool:
    from megatron import get_args

    return get_args().cross_entropy_fusion_impl == "linear"


def _loss_of_factors(lm_output: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    from megatron import get_args
    from megatron.core import parallel_state, tensor_parallel

    group = parallel_state.get_tensor_model_parallel_group()
    if get_args().sequence_parallel:
        lm_output = tensor_parallel.gather_from_sequence_parallel_region(lm_output)
    elif group.size() > 1:
        lm_output = tensor_parallel.copy_to_tensor_model_parallel_region(lm_output)
    return loss_of_factors(
        lm_output,
        weight,
        labels,
        group=group,
        into_main_grad=get_args().gradient_accumulation_fusion,
        recompute=_asks_for_linear(),
    )
