"""The Walsh-Hadamard transform, against its butterflies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops.hadamard import hadamard_transform
from tests.ops.against_fp64 import RELAXED, check


def butterflies(x):
    """Sums and differences of neighbours, then of pairs of them, and so on."""
    size = x.size(-1)
    x = F.pad(x, (0, (1 << (size - 1).bit_length()) - size))
    width = 1
    while width < x.size(-1):
        first, second = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack([first + second, first - second], -2).flatten(-3)
        width *= 2
    return 0.25 * x[..., :size]


@RELAXED
@given(size=st.sampled_from([1, 2, 5, 8, 16, 128]))
def test_transform(device, dtype, size):
    torch.manual_seed(size)
    x = torch.randn(3, 2, size, device=device)
    check(lambda x: hadamard_transform(x, 0.25).clone(), butterflies, [x], dtype)


def test_twice_is_once_and_lengths_are_kept():
    x = torch.randn(3, 64)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x, 1 / 8), 1 / 8), x)
    torch.testing.assert_close(hadamard_transform(x, 1 / 8).norm(), x.norm())
