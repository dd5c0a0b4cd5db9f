"""Products of each expert's rows with that expert's weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_npu.ops.experts.grouped_matmul import grouped_linear, grouped_matmul
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


@RELAXED
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    inner=st.sampled_from([1, 8, 24]),
    outer=st.sampled_from([1, 16, 40]),
    bias=st.booleans(),
)
def test_weights_one_by_one(device, dtype, counts, inner, outer, bias):
    """And biases; experts without rows included."""
    experts = len(counts)

    def formula(input, *parameters):
        expert = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
        output = torch.einsum("ti,toi->to", input, torch.stack(parameters[:experts])[expert])
        return output + torch.stack(parameters[experts:])[expert] if bias else output

    tensors = [torch.randn(sum(counts), inner, device=device)]
    tensors += [torch.randn(outer, inner, device=device) for _ in counts]
    tensors += [torch.randn(outer, device=device) for _ in counts] if bias else []

    def operation(input, *parameters):
        return grouped_linear(input, parameters[:experts], counts, parameters[experts:] or None)

    check(operation, formula, tensors, dtype)


def test_weights_one_by_one_are_not_copied(device):
    """Only what comes out is new: a copy of the weights would be twelve times that."""
    weights = [torch.randn(64, 48, device=device) for _ in range(4)]
    rows = torch.randn(16, 48, device=device)
    with NewBytes() as new:
        output = grouped_linear(rows, weights, [4, 4, 4, 4])
    assert new.largest == output.nbytes < weights[0].nbytes


class NewBytes(TorchDispatchMode):
    """The largest tensor that comes out of torch's functions and is no view."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.nbytes)
        return result


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
    with pytest.raises(ValueError, match=r"must have the shapes|with one|one entry for each"):
        grouped_matmul(torch.ones(input), torch.ones(weight), torch.ones(counts, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"the input must have shape \[t, i\], with one weight \[o, i\] for each of"
    ):
        grouped_linear(torch.ones(input), [torch.ones(4, 7)] * 2, [1] * counts)
