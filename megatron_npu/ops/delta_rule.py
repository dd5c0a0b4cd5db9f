"""Compute the gated delta rule of linear attention, in which a decaying state is corrected at each key.

The rule is implemented in plain torch on every device, with matrix products over chunks in place of a loop
over the sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.dispatch import Make, Operation
from megatron_npu.ops.state_space import sums_between


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float, chunk: int = 64
) -> Tensor:
    """Return the outputs of ``S_t = S' + beta_t k_t (v_t - S'ᵀ k_t)ᵀ``, where ``S' = exp(log_decay_t)
    S_(t-1)`` and S_0 = 0.

    ``o_t = scale S_tᵀ q_t``.

    Args:
        q, k: ``[batch, s, heads, n]``, fp32, bf16 or fp16.
        v: ``[batch, s, heads, p]``.
        log_decay: ``[batch, s, heads]``, not positive; any float dtype.
        beta: ``[batch, s, heads]``, the update strength from 0 to 1.
        scale: the factor applied to the outputs.
        chunk: the number of steps that are computed together, a power of two; it only affects rounding.

    Returns:
        ``[batch, s, heads, p]``, in the dtype of ``q``; computed in fp32.

    Raises:
        ValueError: the shapes do not match, or the chunk is not a power of two.

    Source: Yang, Kautz and Hatamizadeh, arXiv:2412.06464: sections 3.1, the recurrence, and 3.3, chunks.
    """
    if q.dim() != 4 or k.shape != q.shape or v.shape[:3] != q.shape[:3] or v.dim() != 4:
        raise ValueError(
            f"the shapes of q, k and v do not match: {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if log_decay.shape != q.shape[:3] or beta.shape != q.shape[:3]:
        shapes = tuple(log_decay.shape), tuple(beta.shape)
        raise ValueError(
            f"q has the shape {tuple(q.shape)}, so log_decay and beta must have the shape "
            f"{tuple(q.shape[:3])} ([batch, s, heads]), but got {shapes}"
        )
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"the number of steps in a chunk must be a power of two, but got {chunk}")
    return _rule(q, k, v, log_decay, beta, scale, chunk)


def _by_steps(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float, chunk: int
) -> Tensor:
    """Compute the gated delta rule one step at a time, as in its definition."""
    kind = torch.promote_types(q.dtype, torch.float32)
    queries, keys, values, decay, share = (part.to(kind) for part in (q, k, v, log_decay.exp(), beta))
    state = values.new_zeros(q.size(0), q.size(2), q.size(3), v.size(3))
    outputs = []
    for t in range(q.size(1)):
        state = decay[:, t, :, None, None] * state
        wrong = values[:, t] - torch.einsum("bhn,bhnp->bhp", keys[:, t], state)
        state = state + torch.einsum("bh,bhn,bhp->bhnp", share[:, t], keys[:, t], wrong)
        outputs.append(scale * torch.einsum("bhn,bhnp->bhp", queries[:, t], state))
    return torch.stack(outputs, 1).to(q.dtype)


_rule = Operation("gated_delta_rule", _by_steps)


@_rule.on("cpu", "cuda", "npu", note="matmuls within chunks, one step per chunk")
def _by_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float, chunk: int
) -> Tensor:
    """Compute the gated delta rule in chunks of the sequence.

    Within a chunk the corrections u solve ``(1 + A) u = beta (v - decay k S)``, A strictly lower.

    All parts are ``[b, z, h, l, ...]``: batch, chunk, head, step within a chunk.
    """
    steps = q.size(1)
    chunk = min(chunk, 1 << (steps - 1).bit_length())
    pad = -steps % chunk  # steps of beta = 0 and no decay change no state
    queries, keys, values, logs, share = (
        F.pad(part.float(), (0, 0) * (part.dim() - 2) + (0, pad)).unflatten(1, (-1, chunk)).movedim(3, 2)
        for part in (q, k, v, log_decay, beta)
    )
    between = sums_between(logs).exp()  # [b, z, h, l, l]: what step l has left of step s, 0 for later ones
    begin = logs.cumsum(-1)[..., None].exp()  # and of the state that the chunk begins with
    weighted = share[..., None] * keys
    inverse = _inverse_of_unit_lower((weighted @ keys.mT * between).tril(-1))
    taken, known = inverse @ (share[..., None] * values), inverse @ (weighted * begin)
    scores = queries @ keys.mT * between
    kept, rest = begin[..., -1:, :], keys * between[..., -1, :, None]
    state = values.new_zeros(q.size(0), q.size(2), q.size(3), v.size(3))
    outputs = []
    for z in range(values.size(1)):
        corrections = taken[:, z] - known[:, z] @ state
        outputs.append((queries[:, z] * begin[:, z]) @ state + scores[:, z] @ corrections)
        state = kept[:, z] * state + rest[:, z].mT @ corrections
    output = torch.stack(outputs, 1).movedim(2, 3).flatten(1, 2)[:, :steps]
    return (scale * output).to(q.dtype).contiguous()


def _inverse_of_unit_lower(lower: Tensor) -> Tensor:
    """Return the inverses of the unit lower triangular matrices ``1 + lower``, ``[..., n, n]``.

    n is a power of two, and ``lower`` is strictly lower triangular.

    ``lower`` is a strictly lower triangular matrix. Both halves of the diagonal are inverted at once, then
    the corner between them: instead of n - 1 substitutions this takes log₂ n pairs of matmuls, and no power
    of ``lower`` grows as it would in a series.
    """
    size = lower.size(-1)
    if size == 1:
        return torch.ones_like(lower)
    half = size // 2
    halves = torch.stack([lower[..., :half, :half], lower[..., half:, half:]])
    first, second = _inverse_of_unit_lower(halves).unbind(0)
    corner = -second @ lower[..., half:, :half] @ first
    upper = torch.cat([first, torch.zeros_like(first)], -1)
    return torch.cat([upper, torch.cat([corner, second], -1)], -2)


@_rule.example()
def _example(make: Make) -> Tensor:
    decay, beta = F.logsigmoid(make(2, 20, 4)), make(2, 20, 4).sigmoid()
    q, k = (F.normalize(make(2, 20, 4, 8), dim=-1) for _ in range(2))
    return gated_delta_rule(q, k, make(2, 20, 4, 16), decay, beta, 8**-0.5, chunk=8)
