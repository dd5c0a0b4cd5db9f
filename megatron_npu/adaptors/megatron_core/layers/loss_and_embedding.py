"""Patch the vocabulary-parallel cross-entropy, its fused variant, and the embedding.

Patches ``tensor_parallel.cross_entropy``, ``fusions.fused_cross_entropy`` and ``tensor_parallel.layers``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import around, replace
from megatron_npu.adaptors.shared import gradients
from megatron_npu.ops import cross_entropy
from megatron_npu.ops.embedding import vocab_parallel_embedding

_WHY = "upstream keeps an fp32 softmax of all logits from forward to backward; ours keeps O(tokens)"


_cross_entropy = partial(
    replace,
    "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
    upstream_bug=True,
    until="the patch is needed to save memory; the bug is in every version up to 0.19.2, #7464",
    why=_WHY
    + "; upstream smooths labels over one rank's part of the vocabulary, so that loss and gradient depend "
    "on the tensor-parallel size",
)


@_cross_entropy(versions="<0.19")
def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Compute the loss ``[s, b]`` in fp32 from logits ``[s, b, v/p]`` and targets ``[s, b]``."""
    return vocab_parallel_cross_entropy_of_group(vocab_parallel_logits, target, label_smoothing)


@_cross_entropy(versions=">=0.19")
def vocab_parallel_cross_entropy_of_group(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Compute ``vocab_parallel_cross_entropy`` over the given group, or over the default group if none is
    given.
    """
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    group = get_tensor_model_parallel_group() if tp_group is None else tp_group
    return _loss(vocab_parallel_logits, target, group, label_smoothing)


@replace(
    "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy",
    why=_WHY + "; upstream also rounds every gradient to bf16, even for fp32 models",
)
def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: ProcessGroup
) -> Tensor:
    """Compute ``vocab_parallel_cross_entropy`` over the given group."""
    return _loss(vocab_parallel_logits, target, tp_group, 0.0)


def _loss(logits: Tensor, target: Tensor, group: ProcessGroup, label_smoothing: float) -> Tensor:
    return cross_entropy.vocab_parallel_cross_entropy(
        logits,
        target,
        vocab_start=group.rank() * logits.size(-1),
        vocab_size=group.size() * logits.size(-1),
        group=group,
        label_smoothing=label_smoothing,
    )


@around(
    "megatron.core.tensor_parallel.layers:_initialize_affine_weight_cpu",
    devices=("cpu",),
    why="--use-cpu-initialization draws from the host's generator, but on a cpu the default generator is "
    "the device's",
)
def initialize_on_host(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Draw the whole weight with the host's generator, so that all tensor-parallel ranks draw the same
    values.
    """
    with devices.current().host_rng():
        return original(*args, **kwargs)


@around(
    "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
    why="upstream indexes with boolean masks, whose size the host has to wait for on npu and cuda; on a cpu "
    "torch sums the gradients of a frequent token in 16 bits",
)
def embed_without_waiting(original: Callable[..., Tensor], self: Any, input_: Tensor) -> Tensor:
    """Look up embeddings: map token ids ``[b, s]`` to ``[b, s, h]``, or to ``[s / tp, b, h]`` under sequence
    parallelism.

    The parts of the ranks are combined as in upstream; upstream's deterministic mode keeps its own lookup.
    """
    if self.deterministic_mode or _reads_otherwise(self):
        return original(self, input_)
    part = vocab_parallel_embedding(
        input_,
        self.weight,
        self.vocab_start_index,
        self.vocab_end_index,
        split=self.weight.size(0) != self.num_embeddings,
        keep_rows=gradients.keep_rows,
    )
    return _combined(self, part)


def _reads_otherwise(embedding: Any) -> bool:
    """Return True if this embedding must be computed by upstream's code.

    This is the case if more ranks share the weight (0.19), or if inference has its own reduction (0.18).
    """
    spread = getattr(embedding, "gtp_remat_size", 1) > 1
    return spread or getattr(embedding, "use_inference_optimized_reduce_scatter", False)


def _combined(embedding: Any, part: Tensor) -> Tensor:
    from megatron.core.tensor_parallel import mappings

    group = getattr(embedding, "tp_group", None)  # an argument since 0.13
    groups = {} if group is None else {"group": group}
    if embedding.reduce_scatter_embeddings:
        part = part.transpose(0, 1).contiguous()
        return mappings.reduce_scatter_to_sequence_parallel_region(part, **groups)
    return mappings.reduce_from_tensor_model_parallel_region(part, **groups)
