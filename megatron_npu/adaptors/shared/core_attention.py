"""Code shared by the core attention of both Megatrons."""

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

_WHY_SOFTMAX = "upstream's kernels are CUDA extensions that it compiles at start"


def connect(recorder: Recorder) -> None:
    """Record the core attention of a tree with ``CoreAttention`` in ``megatron/model/transformer.py``.

    Also the softmax, for what does not go through it.

    Args:
        recorder: that of the checkout.
    """
    recorder.replace(
        "megatron.model.transformer:CoreAttention.forward",
        why="upstream materialises the scores [b, n, sq, sk]; the device has fused attention",
    )(forward)
    softmax_class = "megatron.model.fused_softmax:FusedScaleMaskSoftmax"
    recorder.replace(f"{softmax_class}.is_kernel_available", why=_WHY_SOFTMAX)(is_kernel_available)
    recorder.replace(f"{softmax_class}.forward_fused_softmax", why=_WHY_SOFTMAX)(forward_fused_softmax)


def forward(
    self: Any, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None
) -> Tensor:
    """``[sq, b, n, d]`` and ``[sk, b, n, d]`` to ``[sq, b, n * d]``.

    The layer has the window and the layout in its ``attention_flags``; without them the flags' defaults hold.
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
    """Turn the flags of upstream's flash attention off while a layer is built; give whether one was on."""
    from megatron import get_args

    args = vars(get_args())
    asked = {name: args[name] for name in names}
    args.update(dict.fromkeys(names, False))
    try:
        yield any(asked.values())
    finally:
        args.update(asked)


def give_flags(layer: Any, core: Any) -> None:
    """Set the window and the layout of the flags in a ``ParallelAttention``'s core attention.

    They are those in force now; cross-attention has no window.
    """
    from megatron import get_args

    flags = AttentionFlags.from_args(get_args())
    core.attention_flags = flags.without_window() if layer.attention_type.name == "cross_attn" else flags


def scale_of(layer: Any) -> float:
    """Return the factor of the scores; --apply-query-key-layer-scaling divides by one and restores it."""
    return (layer.scale_mask_softmax.scale or 1.0) / layer.norm_factor


def more_is_masked_than_the_future() -> bool:
    """Return whether a causal layer's mask holds more than the causal triangle.

    So it is with ``--reset-attention-mask`` (documents in one sample) and in T5's decoder (padding).
    """
    from megatron import get_args

    args = get_args()
    # get_model sets the model's type: it is absent where a layer is built alone, and in bigscience's tree
    encoding = getattr(getattr(args, "model_type", None), "name", "") == "encoder_and_decoder"
    return args.reset_attention_mask or encoding or args.decoder_seq_length is not None


def attend(query: Tensor, key: Tensor, value: Tensor, *, flags: AttentionFlags, **kwargs: Any) -> Tensor:
    """Return the attention ``[sq, b, n, d]``, contiguous; queries ``[sq, b, n, d]``, keys ``[sk, b, n, d]``.

    Args:
        flags: window, and layout to call the operation with. Heads stay a separate dimension, since SBH and
            SBND have the same memory layout.
        kwargs: further arguments of ``ops.attention.attention``.
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
    """Save only the memory of the three tensors in ``_checkpointed_attention_forward``.

    A layer that recomputes the up-projection too, frees the tensors themselves: they stay as they are.
    """
    if not getattr(self, "recompute_up_proj", False):
        query, key, value = out_of_larger_memory(query, key, value)
    return original(self, query, key, value, *args, **kw)


def out_of_larger_memory(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy those tensors that are parts of a memory of which all of them leave some unused.

    So it is with values beside turned queries and keys: what is turned is new, and the values alone hold the
    product that all three came from. Three parts that make up the product stay: copies would be as large.
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
    """Return the context in which upstream drops out: heads are split, so each rank has its own masks.

    Where nobody has seeded the ranks (``model_parallel_cuda_manual_seed``) there is no such context, and the
    device's generator is drawn from: as in TransformerEngine's attention, for which ours stands.

    Args:
        sequence_parallel: then the whole layer is in such a context.
    """
    if dropout_p == 0.0 or sequence_parallel:
        return contextlib.nullcontext()
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    return tracker.fork() if tracker.get_states() else contextlib.nullcontext()


def is_kernel_available(self: Any, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
    """Return whether ``forward_fused_softmax`` means the same as upstream's torch path for this call."""
    return self.scaled_masked_softmax_fusion and (self.attn_mask_type.name != "causal" or sq == sk)


def forward_fused_softmax(self: Any, input: Tensor, mask: Tensor | None) -> Tensor:
    """``[b, n, sq, sk]`` scores to probabilities of the same shape and dtype: ``FusedScaleMaskSoftmax``'s.

    A causal mask that forbids more than the future (``--reset-attention-mask``) counts; the causal kernel of
    Megatron-LM 285068c8 ignores it.
    """
    causal = self.attn_mask_type.name == "causal"
    return softmax.scale_mask_softmax(input, mask, self.scale, causal)
