"""Products of each expert's rows with that expert's weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops.grouped_matmul import grouped_matmul
from tests.ops.against_fp64 import RELAXED, check


@RELAXED
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    inner=st.sampled_from([1, 8, 24]),
    outer=st.sampled_from([1, 16, 40]),
)
def test_products_and_gradients(device, dtype, counts, inner, outer):
    """Experts without rows included."""

    def formula(input, weight):
        expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return torch.einsum("tk,tkn->tn", input, weight[expert])

    tensors = (
        torch.randn(sum(counts), inner, device=device),
        torch.randn(len(counts), inner, outer, device=device),
    )
    check(lambda x, w: grouped_matmul(x, w, torch.tensor(counts)), formula, tensors, dtype)


def test_no_row_at_all(device):
    input = torch.randn(0, 8, device=device, requires_grad=True)
    weight = torch.randn(2, 8, 16, device=device, requires_grad=True)
    output = grouped_matmul(input, weight, torch.zeros(2, dtype=torch.int64))
    assert output.shape == (0, 16)
    output.sum().backward()
    assert not weight.grad.any()


def test_gradients_without_strides(device):
    """The gradient of a sum is one number, expanded."""
    input = torch.randn(3, 8, device=device, requires_grad=True)
    weight = torch.randn(2, 8, 16, device=device)
    grouped_matmul(input, weight, torch.tensor([1, 2], device=device)).sum().backward()
    torch.testing.assert_close(input.grad, weight.sum(2)[[0, 1, 1]])


@pytest.mark.parametrize(
    ("input", "weight", "counts"), [((3, 8), (2, 7, 4), 2), ((3, 8), (8, 4), 8), ((3, 8), (2, 8, 4), 3)]
)
def test_shapes_that_do_not_fit(input, weight, counts):
    with pytest.raises(ValueError, match=r"do not fit|as many counts"):
        grouped_matmul(torch.ones(input), torch.ones(weight), torch.ones(counts, dtype=torch.int64))
