"""Define reference kernels for DeepSeek's sparse attention of many heads to selected rows of one latent
key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel

_EVERYTHING = 9223372036854775807


@kernel("npu_sparse_flash_attention")
def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = _EVERYTHING,
    next_tokens: int = _EVERYTHING,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``softmax(scale · q·k̃ᵀ)·ṽ``, ``[b, s, n, 512]``, and the maximum and sum of each row
    of scores.

    k̃ and ṽ are the rows that ``sparse_indices`` ``[b, s, 1, k]`` select; negative indices select no row. The
    scores of the rotated parts, ``query_rope`` and ``key_rope``, are added. Statistics are ``[b, 1, s, n]``
    in fp32, or empty.
    """
    assert value is not None
    assert query_rope is not None
    assert key_rope is not None
    scores = _scores(query, key, query_rope, key_rope, sparse_indices, scale_value, sparse_mode)
    maximum = scores.amax(-1)
    maximum = maximum.masked_fill(maximum == float("-inf"), 0.0)
    weights = torch.exp(scores - maximum[..., None])
    total = weights.sum(-1)
    rows = _rows(value, sparse_indices)
    output = torch.einsum("bsnk,bskd->bsnd", weights / total.clamp(min=1e-30)[..., None], rows)
    if not return_softmax_lse:
        return output.to(query.dtype), torch.empty(0), torch.empty(0)
    return output.to(query.dtype), maximum[:, None].clone(), total[:, None].clone()


@kernel("npu_sparse_flash_attention_grad")
def npu_sparse_flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    sparse_block_size: int,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = _EVERYTHING,
    next_tokens: int | None = _EVERYTHING,
    attention_mode: int | None = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and both rotary parts.

    The weights are recomputed.
    """
    assert value is not None
    assert query_rope is not None
    assert key_rope is not None
    scores = _scores(query, key, query_rope, key_rope, sparse_indices, scale_value, int(sparse_mode or 0))
    weights = torch.exp(scores - softmax_max[:, 0, ..., None])
    weights = weights / softmax_sum[:, 0, ..., None].clamp(min=1e-30)
    grad_output = d_out.float()
    grad_weights = torch.einsum("bsnd,bskd->bsnk", grad_output, _rows(value, sparse_indices))
    inner = (grad_output * out.float()).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - inner) * scale_value
    grad_value = _added(torch.einsum("bsnk,bsnd->bskd", weights, grad_output), sparse_indices, value)
    grads = []
    for of_query, of_key in ((query, key), (query_rope, key_rope)):
        grads.append(
            torch.einsum("bsnk,bskd->bsnd", grad_scores, _rows(of_key, sparse_indices)).to(query.dtype)
        )
        chosen = torch.einsum("bsnk,bsnd->bskd", grad_scores, of_query.float())
        grads.append(_added(chosen, sparse_indices, of_key))
    grad_query, grad_key, grad_query_rope, grad_key_rope = grads
    return grad_query, grad_key, grad_value, grad_query_rope, grad_key_rope


def _scores(
    query: Tensor,
    key: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    indices: Tensor,
    scale: float,
    mode: int,
) -> Tensor:
    """Return the scores ``[b, s, n, k]``, which are -inf for rows that are not selected and, in mode 3,
    for later keys.
    """
    scores = torch.einsum("bsnd,bskd->bsnk", query.float(), _rows(key, indices))
    scores += torch.einsum("bsnd,bskd->bsnk", query_rope.float(), _rows(key_rope, indices))
    chosen = indices[:, :, 0].long()
    forbidden = chosen < 0
    if mode == 3:
        last = torch.arange(query.size(1)) + key.size(1) - query.size(1)
        forbidden |= chosen > last[:, None]
    return (scores * scale).masked_fill(forbidden[:, :, None], float("-inf"))


def _rows(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return the selected rows of a tensor ``[b, t, 1, d]`` as fp32 ``[b, s, k, d]``."""
    chosen = indices[:, :, 0].long().clamp(min=0)
    batch = torch.arange(tensor.size(0))[:, None, None]
    return tensor[:, :, 0].float()[batch, chosen]


def _added(rows: Tensor, indices: Tensor, like: Tensor) -> Tensor:
    """Add the rows ``[b, s, k, d]`` to zeros at the selected positions, and return the result.

    Entries without a row are zero.
    """
    chosen = indices[:, :, 0].long().clamp(min=0)
    result = torch.zeros(like.size(0), like.size(1), like.size(3), dtype=torch.float32)
    for batch in range(like.size(0)):
        result[batch].index_add_(0, chosen[batch].flatten(), rows[batch].flatten(0, 1))
    return result[:, :, None].to(like.dtype)
