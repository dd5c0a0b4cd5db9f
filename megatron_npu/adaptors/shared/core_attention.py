"""Implement the core attention that the older Megatron checkouts share."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from megatron_npu.ops import softmax
from megatron_npu.ops.attention import attention
from megatron_npu.options.attention_flags import DEFAULTS, AttentionFlags
from megatron_npu.patching.registry import Recorder

_WHY_SOFTMAX = "upstream's kernels are CUDA extensions, which it compiles at start"


def connect(recorder: Recorder) -> None:
    """Record the patches for the class ``CoreAttention`` in a checkout's ``megatron/model/transformer.py``.

    The softmax is recorded too, for attention that does not use it.

    Args:
        recorder: the checkout's recorder.
    """
    recorder.replace(
        "megatron.model.transformer:CoreAttention.forward",
        why="upstream materializes the scores [b, n, sq, sk], but the device has fused attention",
    )(forward)
    softmax_class = "megatron.model.fused_softmax:FusedScaleMaskSoftmax"
    recorder.replace(f"{softmax_class}.is_kernel_available", why=_WHY_SOFTMAX)(is_kernel_available)
    recorder.replace(f"{softmax_class}.forward_fused_softmax", why=_WHY_SOFTMAX)(forward_fused_softmax)


def forward(
    self: Any, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None
) -> Tensor:
    """Compute attention: map queries ``[sq, b, n, d]`` and keys and values ``[sk, b, n, d]`` to ``[sq, b, n *
    d]``.

    The layer's ``attention_flags`` contain the window and the layout. If the layer has none, the default
    values of the flags apply.
    """
    flags: AttentionFlags = getattr(self, "attention_flags", DEFAULTS)
    causal = self.attn_mask_type.name == "causal"
    dropout_p = self.attention_dropout.p if self.training else 0.0
    with dropout_generator(dropout_p, self.sequence_parallel):
        return attend(
            query_layer,
            key_layer,
            value_layer,
            flags=flags,
            scale=scale_of(self),
            causal=causal,
            offset=key_layer.size(0) - query_layer.size(0) if causal else 0,
            mask=attention_mask if not causal or more_is_masked_than_the_future() else None,
            dropout_p=dropout_p,
        ).flatten(2)


@contextlib.contextmanager
def without_flash(*names: str) -> Iterator[bool]:
    """Disable upstream's flash-attention flags while a layer is built.

    Yield whether one was enabled.
    """
    from megatron import get_args

    args = vars(get_args())
    asked = {name: args[name] for name in names}
    args.update(dict.fromkeys(names, False))
    try:
        yield any(asked.values())
    finally:
        args.update(asked)


def give_flags(layer: Any, core: Any) -> None:
    """Set the window and the layout of a ``ParallelAttention`` according to the flags.

    Both are set on the core attention of the ``ParallelAttention``. Cross-attention has no window.
    """
    from megatron import get_args

    flags = AttentionFlags.from_args(get_args())
    core.attention_flags = flags.without_window() if layer.attention_type.name == "cross_attn" else flags


def scale_of(layer: Any) -> float:
    """Return the scale of the attention scores, including the factor of --apply-query-key-layer-scaling."""
    return (layer.scale_mask_softmax.scale or 1.0) / layer.norm_factor


def more_is_masked_than_the_future() -> bool:
    """Return True if the mask of a causal layer does more than hide future keys.

    This is the case with ``--reset-attention-mask`` (several documents in a sample) and in T5's decoder
    (padding).
    """
    from megatron import get_args

    args = get_args()
    # get_model sets the model's type: it is absent where a layer is built alone, and in bigscience's tree
    encoding = getattr(getattr(args, "model_type", None), "name", "") == "encoder_and_decoder"
    return args.reset_attention_mask or encoding or args.decoder_seq_length is not None


def attend(query: Tensor, key: Tensor, value: Tensor, *, flags: AttentionFlags, **kwargs: Any) -> Tensor:
    """Return the attention output ``[sq, b, n * d]`` as a contiguous tensor, for keys and values ``[sk, b, n,
    d]``.

    Args:
        flags: the window, and the layout with which the operation is called. Heads stay a separate dimension,
            because SBH and SBND have the same memory layout.
        kwargs: additional arguments of ``ops.attention.attention``.
    """
    asked: dict[str, Any] = {"window": flags.window, "flags": flags, **kwargs}
    if flags.shape_order == "SBH":
        return attention(query, key, value, layout="SBND", **asked).contiguous()
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return attention(query, key, value, layout="BSND", **asked).transpose(0, 1).contiguous()


def recomputed(
    original: Callable[..., Tensor],
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kw: Any,
) -> Tensor:
    """Compute attention with recomputation in the backward pass, saving only the three input tensors.

    A layer that also recomputes the up-projection frees the tensors itself, so in that case they are left
    unchanged.
    """
    if not getattr(self, "recompute_up_proj", False):
        query, key, value = out_of_larger_memory(query, key, value)
    return original(self, query, key, value, *args, **kw)


def out_of_larger_memory(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy each tensor that uses only part of its storage, taking all given tensors together.

    This applies to the values when queries and keys are rotated: the rotated tensors are new, and the values
    would keep the memory of the whole projection allocated. If the three tensors fill the memory, they are
    not copied, because the copies would be as large.
    """
    used: Counter[int] = Counter()
    for tensor in tensors:
        used[tensor.untyped_storage().data_ptr()] += tensor.nbytes
    return tuple(
        tensor.contiguous() if used[memory.data_ptr()] < memory.nbytes() else tensor
        for tensor in tensors
        for memory in (tensor.untyped_storage(),)
    )


def dropout_generator(dropout_p: float, sequence_parallel: bool) -> contextlib.AbstractContextManager[Any]:
    """Return the context for upstream's dropout, in which each rank draws masks for its own heads.

    If the ranks were not seeded (``model_parallel_cuda_manual_seed``), there is no such context, and masks
    are drawn from the device's generator, as in the TransformerEngine attention that ours replaces.

    Args:
        sequence_parallel: whether the whole layer already runs in such a context.
    """
    if dropout_p == 0.0 or sequence_parallel:
        return contextlib.nullcontext()
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    return tracker.fork() if tracker.get_states() else contextlib.nullcontext()


def is_kernel_available(self: Any, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
    """Return True if ``forward_fused_softmax`` gives the same result as upstream's torch code."""
    return self.scaled_masked_softmax_fusion and (self.attn_mask_type.name != "causal" or sq == sk)


def forward_fused_softmax(self: Any, input: Tensor, mask: Tensor | None) -> Tensor:
    """Convert attention scores ``[b, n, sq, sk]`` to probabilities like ``FusedScaleMaskSoftmax``, in the
    same dtype.

    A causal mask that hides more than later keys (``--reset-attention-mask``) is respected; the
    causal kernel of Megatron-LM 285068c8 ignores it.
    """
    causal = self.attn_mask_type.name == "causal"
    return softmax.scale_mask_softmax(input, mask, self.scale, causal)
