"""Compute Mamba-2 state-space layers: the selective scan and the short causal convolution that precedes it.

The scan is implemented in plain torch on every device, with matrix products over chunks in place of a loop
over the sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.dispatch import Make, Operation


def selective_scan(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int = 256) -> Tensor:
    """Return the outputs of ``h_t = exp(dt_t decay) h_(t-1) + dt_t b_t x_tᵀ``, ``y_t = c_tᵀ h_t`` with h_0 =
    0.

    Args:
        x: ``[batch, s, heads, p]``, fp32, bf16 or fp16.
        dt: ``[batch, s, heads]``, the step size, positive; any float dtype.
        decay: ``[heads]``, negative.
        b, c: ``[batch, s, groups, n]``; each is shared by ``heads / groups`` heads.
        chunk: number of steps computed together; it only affects rounding.

    Returns:
        ``[batch, s, heads, p]``, in the dtype of ``x``; computed in fp32.

    Raises:
        ValueError: the shapes do not match.

    Source: Dao and Gu, arXiv:2405.21060: the recurrence is equation 2, the chunks are section 6.
    """
    if x.dim() != 4 or dt.shape != x.shape[:3] or decay.shape != x.shape[2:3]:
        shapes = tuple(x.shape), tuple(dt.shape), tuple(decay.shape)
        raise ValueError(
            "x, dt and decay must have the shapes [batch, s, heads, p], [batch, s, heads] and [heads], "
            f"but got {shapes}"
        )
    if b.shape != c.shape or b.dim() != 4 or b.shape[:2] != x.shape[:2] or x.size(2) % b.size(2):
        raise ValueError(
            f"the shapes of b {tuple(b.shape)} and c {tuple(c.shape)} do not match the shape of x "
            f"{tuple(x.shape)}"
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, but got {chunk}")
    return _scan(x, dt, decay, b, c, chunk)


def causal_convolution(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``silu(bias + sum of weight[:, k] * input_(t - w + 1 + k))``, computed for each channel
    separately.

    Args:
        input: ``[batch, s, d]``; values before the first step are 0.
        weight: ``[d, w]``.
        bias: ``[d]`` or None.

    Returns:
        ``[batch, s, d]``, in the dtype of ``input``; computed in fp32.
    """
    steps, width = input.size(1), weight.size(1)
    padded = F.pad(input, (0, 0, width - 1, 0)).float()
    taps = weight.float().unbind(1)
    output = padded[:, :steps] * taps[0]
    for k in range(1, width):
        output = torch.addcmul(output, padded[:, k : k + steps], taps[k])
    if bias is not None:
        output = output + bias.float()
    return F.silu(output).to(input.dtype)


def sums_between(logs: Tensor) -> Tensor:
    """Return ``[..., l, s]``, the sums of a tensor ``[..., l]`` over the steps after s, up to and including
    l.

    The sums are -inf if s is later than l.

    Each sum is computed separately: differences of cumulative sums would lose precision.
    """
    steps = logs.size(-1)
    later = torch.ones(steps, steps, dtype=torch.bool, device=logs.device).triu(1)
    added = logs[..., None].expand(*logs.shape, steps).masked_fill(later.logical_not().t(), 0.0)
    return added.cumsum(-2).masked_fill(later, -torch.inf)


def _by_steps(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Compute the selective scan one step at a time, as in its definition."""
    values, dt = x.to(torch.promote_types(x.dtype, torch.float32)), dt.to(decay.dtype)
    heads = x.size(2) // b.size(2)
    b, c = (part.to(values.dtype).repeat_interleave(heads, dim=2) for part in (b, c))
    state = values.new_zeros(x.size(0), x.size(2), b.size(3), x.size(3))
    outputs = []
    for t in range(x.size(1)):
        kept = (dt[:, t] * decay).exp()[..., None, None] * state
        state = kept + (dt[:, t, :, None] * b[:, t])[..., None] * values[:, t, :, None]
        outputs.append(torch.einsum("bhn,bhnp->bhp", c[:, t], state))
    return torch.stack(outputs, 1).to(x.dtype)


_scan = Operation("selective_scan", _by_steps)


@_scan.on("cpu", "cuda", "npu", note="matmuls within chunks, one step per chunk")
def _by_chunks(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Compute the selective scan in chunks of the sequence.

    The letters in the products mean: b batch, z chunk, g group, h head of a group, l and s steps of a chunk.
    """
    (batch, steps, heads, width), groups = x.shape, b.size(2)
    chunk = min(chunk, steps)
    pad = -steps % chunk  # steps of dt = 0 change no state
    x_, dt_, b_, c_ = (
        F.pad(part.float(), (0, 0) * (part.dim() - 2) + (0, pad)).unflatten(1, (-1, chunk))
        for part in (x, dt, b, c)
    )
    x_ = (x_ * dt_[..., None]).unflatten(3, (groups, -1))
    # [b, z, g, h, l]: how much of a state each step leaves, as a logarithm
    logs = (dt_ * decay.float()).movedim(2, 3).unflatten(2, (groups, -1))
    between = sums_between(logs).exp()
    scores = torch.einsum("bzlgn,bzsgn->bzgls", c_, b_)[:, :, :, None] * between
    output = torch.einsum("bzghls,bzsghp->bzlghp", scores, x_)
    added = torch.einsum("bzghs,bzsgn,bzsghp->bzghnp", between[..., -1, :], b_, x_)
    left = logs.cumsum(-1).exp()  # of the state of a chunk's begin
    states, state = [], torch.zeros_like(added[:, 0])
    for kept, new in zip(left[..., -1].unbind(1), added.unbind(1), strict=True):
        states.append(state)
        state = kept[..., None, None] * state + new
    before = torch.stack(states, 1)
    output = output + torch.einsum("bzlgn,bzghnp,bzghl->bzlghp", c_, before, left)
    return output.reshape(batch, steps + pad, heads, width)[:, :steps].to(x.dtype).contiguous()


@_scan.example()
def _example(make: Make) -> Tensor:
    dt, decay = F.softplus(make(2, 20, 4)), -make(4).exp()
    return selective_scan(make(2, 20, 4, 8), dt, decay, make(2, 20, 2, 16), make(2, 20, 2, 16), chunk=8)
