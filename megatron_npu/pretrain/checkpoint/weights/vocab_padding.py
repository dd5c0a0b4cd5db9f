"""Fill the padding rows of the vocabulary if the run's layout requires more rows than the checkpoint
contains.

megatron-core fills these rows with zeros, so that their logit is 0. In a model whose other logits are far
below 0, such as OpenAI's GPT-2, this would make a padding token the most likely one. Here these rows are the
mean of the real rows: the exponential of the mean of all logits is at most the mean of their exponentials, so
a padding row gets at most 1/V of the softmax's sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_npu.pretrain.checkpoint.weights import row_shards
from megatron_npu.pretrain.model.gpt import unwrap


def mean_row(rows: torch.Tensor, vocab_size: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the row ``[h]`` with which the vocabulary is padded, which is the mean of its rows in fp32.

    Args:
        rows: [rows, h], this process's rows that represent tokens; may be empty.
        vocab_size: number of such rows in all processes.
        group: the processes that share the rows, all of which must call this. If None, this process has all
            rows.
    """
    total = rows.float().sum(0)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total / vocab_size


@torch.no_grad()
def fill(model: Sequence[torch.nn.Module], saved_rows: int, vocab_size: int) -> None:
    """Fill the rows of the vocabulary that are missing from a checkpoint. All ranks must call this.

    Args:
        model: this process's chunks of the model.
        saved_rows: the number of rows of the embedding in the checkpoint, including padding.
        vocab_size: the number of rows that represent tokens.
    """
    for chunk in map(unwrap, model):
        for name in ("embedding.word_embeddings", "output_layer"):
            weight = dict(chunk.named_parameters()).get(f"{name}.weight")
            if weight is not None:  # other pipeline stages have it, or both are one
                _fill_shard(weight, saved_rows, vocab_size)


def _fill_shard(weight: torch.Tensor, saved_rows: int, vocab_size: int) -> None:
    """Fill the missing rows in this rank's part ``[rows, h]`` of the vocabulary.

    torch's FSDP may have sharded the part.
    """
    from megatron.core import parallel_state

    if isinstance(weight, DTensor):
        rows, where = row_shards.rows_of_rank(weight)
        first, group = where.start, weight.device_mesh.get_group()
    else:
        rows, first = weight, parallel_state.get_tensor_model_parallel_rank() * weight.size(0)
        group = parallel_state.get_tensor_model_parallel_group()
    rows[max(saved_rows - first, 0) :] = mean_row(rows[: max(vocab_size - first, 0)], vocab_size, group)
