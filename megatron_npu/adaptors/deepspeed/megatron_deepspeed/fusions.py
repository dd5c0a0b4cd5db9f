"""Replace elementwise functions that upstream compiles with TorchScript's fusers.

These fusers do not support NPUs.

Patches ``fused_bias_gelu``, ``transformer``, ``glu_activations``, ``positional_embeddings`` and ``utils`` of
``megatron.model``.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import constant, records, replace
from megatron_npu.adaptors.shared.layers import fusions
from megatron_npu.ops import activation
from megatron_npu.ops.rotary import rotary_by_tables

fusions.connect(records)
fusions.connect_gelu(records)


def liglu(input: Tensor) -> Tensor:
    """Return ``a * b``, ``[..., h]``, for an input ``[a, b]``, ``[..., 2h]`` (Shazeer 2020)."""
    value, gate = input.chunk(2, -1)
    return value * gate


def geglu(input: Tensor) -> Tensor:
    """Return ``a * gelu(b)``, with the exact form of GELU, for ``input = [a, b]``."""
    value, gate = input.chunk(2, -1)
    return value * activation.gelu(gate)


def reglu(input: Tensor) -> Tensor:
    """Return ``a * relu(b)`` for ``input = [a, b]``."""
    value, gate = input.chunk(2, -1)
    return value * F.relu(gate)


def swiglu(input: Tensor) -> Tensor:
    """Return ``a * silu(b)`` for ``input = [a, b]``.

    The gate is the second half, unlike in ``ops.activation``.
    """
    value, gate = input.chunk(2, -1)
    return value * F.silu(gate)


constant(
    "megatron.model.glu_activations:GLU_ACTIVATIONS",
    {"geglu": geglu, "liglu": liglu, "reglu": reglu, "swiglu": swiglu},
    why=fusions.COMPILED_ANEW,
)


@replace("megatron.model.positional_embeddings:apply_rotary_pos_emb", why=fusions.COMPILED_ANEW)
def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Apply rotary embedding to ``[sq, b * n, d]`` and ``[sk, b * n, d]`` at the positions from
    ``offset`` on.
    """
    return _turn(q, cos, sin, offset), _turn(k, cos, sin, offset)


def _turn(input: Tensor, cosine: Tensor, sine: Tensor, offset: int) -> Tensor:
    rows = slice(offset, offset + input.size(0))
    return rotary_by_tables(input[:, None], cosine[rows, None], sine[rows, None]).squeeze(1)
