"""Fix the rotary embedding of ``megatron.model.rotary_pos_embedding``, where upstream confuses two tables.

Upstream builds a table of cosines and one of sines, then passes the first to queries and the second to keys
as if they were angles, and computes the cosine and sine of these again. Here, both tables are passed as one
tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import backport
from megatron_npu.ops.rotary import rotary_by_tables

_MODULE = "megatron.model.rotary_pos_embedding"


@backport(
    f"{_MODULE}:RotaryEmbedding.forward",
    why=(
        "the pipeline moves the rotary tables to the device, and text generation treats them as one "
        "table: both raise an error, because the result is a list of two tables"
    ),
)
def both_tables(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Return the cosines and sines as one tensor ``[2, s, 1, 1, r]``, which callers unpack into two
    tables.
    """
    return torch.stack(original(*args, **kwargs))


def side_by_side(tables: Any) -> Tensor | None:
    """Concatenate a layer's two tables into one, ``[s, 1, 1, 2 r]``, whose rows are selected by position."""
    return None if tables is None else torch.cat([*tables], -1)


def turn(t: Tensor, tables: Tensor) -> Tensor:
    """Apply rotary embedding to ``[s, b, n, d]`` with the table from ``side_by_side``.

    The tables may have more than s rows.
    """
    cosine, sine = tables[: t.size(0)].chunk(2, -1)
    return rotary_by_tables(t, cosine, sine)


@backport(
    f"{_MODULE}:apply_rotary_pos_emb",
    why=(
        "upstream takes the cosine and sine of a table that already holds cosines, and reuses them for "
        "keys: all angles lie between -1 and 1, regardless of the position"
    ),
)
def apply_rotary_pos_emb(original: Callable[..., Tensor], t: Tensor, freqs: Tensor) -> Tensor:
    """Apply rotary embedding to ``t`` with the concatenated tables in ``freqs``."""
    return turn(t, freqs)
