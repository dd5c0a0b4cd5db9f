"""``megatron.core.tensor_parallel.cross_entropy`` and its fused twin, by one operation."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_npu.adaptors.megatron_core.decorators import replace
from megatron_npu.ops import cross_entropy

_WHY = "upstream holds an fp32 softmax of the whole logits from forward to backward; ours O(tokens)"


@replace("megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy", why=_WHY)
def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """``[s, b, v/p]`` logits and ``[s, b]`` targets to the ``[s, b]`` loss, fp32."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    group = get_tensor_model_parallel_group()
    return _loss(vocab_parallel_logits, target, group, label_smoothing)


@replace(
    "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy",
    why=_WHY + "; upstream also rounds every gradient to bf16, fp32 models included",
)
def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: ProcessGroup
) -> Tensor:
    """As ``vocab_parallel_cross_entropy``, the group given."""
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
