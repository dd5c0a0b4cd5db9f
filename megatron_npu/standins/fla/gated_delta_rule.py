"""Stub for ``fla.ops.gated_delta_rule``, a linear attention whose state decays and is corrected."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_npu.ops.delta_rule import gated_delta_rule
from megatron_npu.standins.fla import lengths_of, refuse_states
from megatron_npu.standins.fla.l2norm import l2norm


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the outputs of the gated delta rule, ``[b, s, heads, p]``, and None in place of a state.

    Args:
        q, k, v, g, beta: see ``ops.delta_rule.gated_delta_rule``; with ``cu_seqlens``, b is 1.
        scale: the factor of the outputs. If None, ``n ** -0.5`` for keys ``[b, s, heads, n]``.
        initial_state, output_final_state: not supported.
        use_qk_l2norm_in_kernel: whether to scale queries and keys to length one first.
        cu_seqlens: where packed sequences begin, ``[n + 1]``, of any integer dtype.

    Raises:
        UsageError: a state is requested.
    """
    refuse_states(initial_state, output_final_state)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    factor = k.size(-1) ** -0.5 if scale is None else scale
    lengths = lengths_of(cu_seqlens, q.size(1))
    sequences = zip(*(part.split(lengths, dim=1) for part in (q, k, v, g, beta)), strict=True)
    outputs = [
        gated_delta_rule(queries, keys, values, decays, shares, factor)
        for queries, keys, values, decays, shares in sequences
    ]
    return torch.cat(outputs, 1), None
