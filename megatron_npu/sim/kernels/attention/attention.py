"""Define reference kernels for npu_fusion_attention and its gradient in all three versions.

The versions differ only in their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_npu.sim.kernels.attention.attention_math import ADD_BEFORE_SCALE, Call, Saved, backward, forward
from megatron_npu.sim.kernels.registry import kernel

NO_LIMIT = 2147483647  # the schema's default of pre_tockens and next_tockens


@kernel("npu_fusion_attention")
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Return the output, the softmax maximum and sum, an empty tensor, and the seed, offset and length of
    the mask.
    """
    call = Call(
        heads=head_num,
        layout=input_layout.upper(),
        pse=pse,
        mask=atten_mask,
        scale=scale,
        keep_prob=keep_prob,
        before=pre_tockens,
        after=next_tockens,
        prefix=prefix,
        query_ends=actual_seq_qlen,
        key_ends=actual_seq_kvlen,
        mode=sparse_mode,
        softmax_layout=softmax_layout,
        sink=sink,
    )
    output, maximum, total, seed, offset, numels = forward(
        call, query, key, value, dropout_mask, seed, offset
    )
    return output, maximum, total, query.new_empty(0), seed, offset, numels


@kernel("npu_fusion_attention_grad")
def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, pse and sink.

    Those of inputs that are None are empty.
    """
    call = Call(
        heads=head_num,
        layout=input_layout.upper(),
        pse=pse,
        mask=atten_mask,
        scale=scale_value,
        keep_prob=keep_prob,
        before=pre_tockens,
        after=next_tockens,
        prefix=prefix,
        query_ends=actual_seq_qlen,
        key_ends=actual_seq_kvlen,
        mode=sparse_mode,
        softmax_layout=softmax_layout,
        sink=sink,
    )
    saved = _saved(softmax_max, softmax_sum, attention_in, seed, offset)
    grads = backward(call, query, key, value, dy, saved)
    return grads.query, grads.key, grads.value, _or_empty(grads.pse, query), _or_empty(grads.sink, query)


@kernel("npu_fusion_attention_v2")
def npu_fusion_attention_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = ADD_BEFORE_SCALE,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Compute ``npu_fusion_attention`` with the signature of its second version.

    ``pse_type`` determines where the position bias is added.
    """
    call = Call(
        heads=head_num,
        layout=input_layout.upper(),
        pse=pse,
        mask=atten_mask,
        scale=scale,
        keep_prob=keep_prob,
        before=pre_tokens,
        after=next_tokens,
        prefix=prefix,
        query_ends=actual_seq_qlen,
        key_ends=actual_seq_kvlen,
        mode=sparse_mode,
        softmax_layout=softmax_layout,
        sink=sink,
        pse_type=pse_type,
    )
    output, maximum, total, seed, offset, numels = forward(
        call, query, key, value, dropout_mask, seed, offset
    )
    return output, maximum, total, query.new_empty(0), seed, offset, numels


@kernel("npu_fusion_attention_grad_v2")
def npu_fusion_attention_grad_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = ADD_BEFORE_SCALE,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients in torch_npu's order: q, k, v, pse, query_rope, key_rope and sink."""
    call = Call(
        heads=head_num,
        layout=input_layout.upper(),
        pse=pse,
        mask=atten_mask,
        scale=scale_value,
        keep_prob=keep_prob,
        before=pre_tokens,
        after=next_tokens,
        prefix=prefix,
        query_ends=actual_seq_qlen,
        key_ends=actual_seq_kvlen,
        mode=sparse_mode,
        softmax_layout=softmax_layout,
        sink=sink,
        pse_type=pse_type,
    )
    saved = _saved(softmax_max, softmax_sum, attention_in, seed, offset)
    grads = backward(call, query, key, value, dy, saved)
    pse, sink = _or_empty(grads.pse, query), _or_empty(grads.sink, query)
    return grads.query, grads.key, grads.value, pse, query.new_empty(0), query.new_empty(0), sink


@kernel("npu_fusion_attention_v3")
def npu_fusion_attention_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute ``npu_fusion_attention`` with seed and offset as tensors, and without a mask length."""
    output, maximum, total, empty, seed, offset, _ = npu_fusion_attention(
        query,
        key,
        value,
        head_num,
        input_layout,
        pse=pse,
        atten_mask=atten_mask,
        scale=scale,
        keep_prob=keep_prob,
        pre_tockens=pre_tockens,
        next_tockens=next_tockens,
        prefix=prefix,
        actual_seq_qlen=_ends(actual_seq_qlen),
        actual_seq_kvlen=_ends(actual_seq_kvlen),
        sparse_mode=sparse_mode,
        softmax_layout=softmax_layout,
        sink=sink,
    )
    return output, maximum, total, empty, torch.tensor([seed]), torch.tensor([offset])


@kernel("npu_fusion_attention_grad_v3")
def npu_fusion_attention_grad_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
    inner_precise: int = 0,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute ``npu_fusion_attention_grad`` with the signature of its third version."""
    return npu_fusion_attention_grad(
        query,
        key,
        value,
        dy,
        head_num,
        input_layout,
        pse=pse,
        atten_mask=atten_mask,
        softmax_max=softmax_max,
        softmax_sum=softmax_sum,
        attention_in=attention_in,
        scale_value=scale_value,
        keep_prob=keep_prob,
        pre_tockens=pre_tockens,
        next_tockens=next_tockens,
        seed=0 if seed is None else int(seed),
        offset=0 if offset is None else int(offset),
        prefix=prefix,
        actual_seq_qlen=_ends(actual_seq_qlen),
        actual_seq_kvlen=_ends(actual_seq_kvlen),
        sparse_mode=sparse_mode,
        softmax_layout=softmax_layout,
        sink=sink,
    )


def _saved(
    maximum: Tensor | None, total: Tensor | None, output: Tensor | None, seed: int, offset: int
) -> Saved:
    """Return the saved tensors, which are optional in the schema but required by the limits."""
    assert maximum is not None
    assert total is not None
    assert output is not None
    return Saved(maximum, total, output, seed, offset)


def _ends(lengths: Tensor | None) -> list[int] | None:
    return None if lengths is None else [int(end) for end in lengths]


def _or_empty(grad: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if grad is None else grad
