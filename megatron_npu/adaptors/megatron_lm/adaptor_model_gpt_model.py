"""``megatron.model.gpt_model``."""

from __future__ import annotations

from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import replace


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
