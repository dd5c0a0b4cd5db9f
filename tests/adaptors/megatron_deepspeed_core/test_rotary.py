"""What layers are given of rotary tables, without upstream."""

from __future__ import annotations

import torch

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core import rotary
from megatron_npu.ops.rotary import rotary as by_angles

S, B, N, D = 6, 2, 3, 8


def upstreams_tables(self: object, max_seq_len: int, offset: int = 0) -> list[torch.Tensor]:
    """As its ``RotaryEmbedding.forward``, of an embedding that knows its angles."""
    angles = self.angles[offset : offset + max_seq_len]
    return [angles.cos(), angles.sin()]


class Embedding:
    angles = torch.outer(torch.arange(2.0 * S), 100.0 ** -torch.linspace(0, 1, D // 2))
    angles = torch.cat([angles, angles], -1)[:, None, None]


def test_layers_turn_by_the_angles():
    tables = rotary.both_tables(upstreams_tables, Embedding(), 2 * S)
    cosine, sine = tables  # as upstream's language model unpacks it
    given = rotary.side_by_side((cosine, sine))
    assert torch.equal(given, rotary.side_by_side(tables))
    assert rotary.side_by_side(None) is None
    query = torch.randn(S, B, N, D)
    for start in (0, 4):  # more rows than tokens; those of a later rank
        expected = by_angles(query, Embedding.angles[start : start + S])
        torch.testing.assert_close(rotary.turn(query, given[start:]), expected)
