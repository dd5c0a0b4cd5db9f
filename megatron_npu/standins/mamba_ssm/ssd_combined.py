"""Stub for ``mamba_ssm.ops.triton.ssd_combined``, the scan of a Mamba-2 layer with and without its
convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.ops.state_space import causal_convolution, selective_scan


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  # the package's names
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    seq_idx: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Return the scan of ``x``, ``[b, s, heads, p]``, plus ``D x``, multiplied by ``silu(z)``.

    Args:
        x, dt, A, B, C: see ``ops.state_space.selective_scan``.
        chunk_size: the number of steps that are computed together.
        D: ``[heads]`` or ``[heads, p]``.
        z: ``[b, s, heads, p]``.
        dt_bias: ``[heads]``, added to ``dt``.
        dt_softplus: whether to apply softplus to the result.
        seq_idx: ``[1, s]``, the index of each token's packed sequence; each sequence is scanned separately.
        others: generation states and limits of dt, which are not supported.

    Raises:
        UsageError: one of ``others`` is given, or ``seq_idx`` has another shape.
    """
    _refuse(others)
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = F.softplus(step) if dt_softplus else step
    output = _one_by_one(
        lambda x, step, b, c: selective_scan(x, step, A, b, c, chunk_size),
        _lengths(seq_idx, x),
        x,
        step,
        B,
        C,
    )
    if D is not None:
        output = output + (x * (D if D.dim() == 2 else D[:, None]).float()).to(x.dtype)
    return output if z is None else output * F.silu(z)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,  # noqa: N803  # the package's names
    D: Tensor,  # noqa: N803
    chunk_size: int,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    seq_idx: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Compute the part of a Mamba-2 layer between its two projections, and return ``[b, s, heads p]``.

    Args:
        zxbcdt: ``[b, s, 2 heads p + 2 groups n + heads]``: the gate, values, b, c and steps, concatenated.
        conv1d_weight, conv1d_bias: ``[d, w]`` and ``[d]``, where d is the size of values, b and c.
        dt_bias, A, D, chunk_size: see ``mamba_chunk_scan_combined``.
        headdim: p. If None, the second size of ``D``.
        ngroups: the number of groups of b and c.
        norm_before_gate: applies to a norm in between, which no caller here requests.
        seq_idx: see ``mamba_chunk_scan_combined``; the convolution also restarts with each sequence.
        others: not supported, like those of ``mamba_chunk_scan_combined``; they include the weights of the
            norm and of the output projection.

    Raises:
        UsageError: one of ``others`` is given, ``seq_idx`` has another shape, or the activation is not silu.
    """
    _refuse(others | ({} if activation in ("silu", "swish") else {"activation": activation}))
    heads, width = D.size(0), D.size(1) if headdim is None else headdim
    inner = heads * width
    state = (zxbcdt.size(-1) - 2 * inner - heads) // 2
    z, convolved, dt = zxbcdt.split([inner, inner + 2 * state, heads], -1)
    lengths = _lengths(seq_idx, convolved)
    convolved = _one_by_one(
        lambda part: causal_convolution(part, conv1d_weight, conv1d_bias), lengths, convolved
    )
    x, b, c = convolved.split([inner, state, state], -1)
    b, c = (part.unflatten(-1, (ngroups, -1)) for part in (b, c))
    x, z = (part.unflatten(-1, (heads, width)) for part in (x, z))
    return mamba_chunk_scan_combined(
        x, dt, A, b, c, chunk_size, D=D, z=z, dt_bias=dt_bias, dt_softplus=True, seq_idx=seq_idx
    ).flatten(-2)


def _one_by_one(function: Callable[..., Tensor], lengths: list[int], *tensors: Tensor) -> Tensor:
    """Apply ``function`` to each packed sequence of ``tensors`` ``[b, s, …]``, and concatenate the
    results.
    """
    if len(lengths) == 1:
        return function(*tensors)
    parts = zip(*(tensor.split(lengths, 1) for tensor in tensors), strict=True)
    return torch.cat([function(*part) for part in parts], 1)


def _lengths(seq_idx: Tensor | None, x: Tensor) -> list[int]:
    """Return the number of tokens of each packed sequence in ``x`` ``[1, s, …]``, as values on the host."""
    if seq_idx is None:
        return [x.size(1)]
    if seq_idx.shape != (1, x.size(1)) or x.size(0) != 1:
        raise UsageError(
            "packed sequences in a Mamba layer must be a single row: seq_idx and the batch must have the "
            f"shape [1, s], but they have the shapes {list(seq_idx.shape)} and {list(x.shape[:2])}. Use "
            "--micro-batch-size 1."
        )
    return torch.unique_consecutive(seq_idx, return_counts=True)[1].tolist()


def _refuse(others: dict[str, Any]) -> None:
    given = [name for name, value in others.items() if torch.is_tensor(value) or value not in (None, False)]
    if given:
        raise UsageError(
            f"{given[0]} in a Mamba layer requires mamba-ssm and causal-conv1d, which are not installed; "
            "only training and generation on whole sequences are supported without them. Disable the "
            "inference cache."
        )
