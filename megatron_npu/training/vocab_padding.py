"""Rows that pad the vocabulary, where a checkpoint has fewer of them than this layout needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_npu.training.model import unwrap


@torch.no_grad()
def fill(model: Sequence[torch.nn.Module], saved: int, vocabulary: int) -> None:
    """Make the rows that a checkpoint did not have the mean of the real ones. All ranks must call this.

    megatron-core fills them with zeros. Their logit is 0 then, which is the likeliest token of a model whose
    logits are far below, as OpenAI's GPT-2's are. A mean row has at most 1/V of what the softmax sums.

    Args:
        model: this process's chunks.
        saved: rows of the embedding in the checkpoint, padding included.
        vocabulary: rows that stand for tokens.
    """
    for chunk in map(unwrap, model):
        for name in ("embedding.word_embeddings", "output_layer"):
            weight = dict(chunk.named_parameters()).get(f"{name}.weight")
            if weight is not None:  # other pipeline stages have it, or both are one
                _fill_shard(weight, saved, vocabulary)


def _fill_shard(weight: torch.Tensor, saved: int, vocabulary: int) -> None:
    """Fill the part [rows, h] of this tensor-parallel rank."""
    from megatron.core import parallel_state

    first = parallel_state.get_tensor_model_parallel_rank() * weight.size(0)
    real = weight[: max(vocabulary - first, 0)].float()
    mean = real.sum(0)
    dist.all_reduce(mean, group=parallel_state.get_tensor_model_parallel_group())
    weight[max(saved - first, 0) :] = mean / vocabulary
