"""The split embedding: lookups, masked tokens, gradients of frequent tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.adaptors.shared import gradients
from megatron_npu.ops.embedding import vocab_parallel_embedding
from tests.ops.against_fp64 import RELAXED, check


@RELAXED
@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 3)),
    start=st.integers(0, 20),
    rows=st.integers(1, 20),
    width=st.integers(1, 9),
)
def test_a_part_of_the_vocabulary(device, dtype, shape, start, rows, width):
    torch.manual_seed(1)
    ids = torch.randint(40, shape)

    def formula(weight):
        table = torch.zeros(40, width, dtype=torch.float64)
        table = torch.cat((table[:start], weight, table[start + rows :]))
        return torch.nn.functional.one_hot(ids, 40).double() @ table

    check(
        lambda weight: vocab_parallel_embedding(ids.to(device), weight, start, start + rows),
        formula,
        [torch.randn(rows, width, device=device)],
        dtype,
    )


@RELAXED
@given(shape=st.tuples(st.integers(1, 7), st.integers(1, 3)), width=st.integers(1, 9))
def test_the_whole_vocabulary(device, dtype, shape, width):
    torch.manual_seed(1)
    ids = torch.randint(12, shape)
    check(
        lambda weight: vocab_parallel_embedding(ids.to(device), weight, 0, 12, split=False),
        lambda weight: torch.nn.functional.one_hot(ids, 12).double() @ weight,
        [torch.randn(12, width, device=device)],
        dtype,
    )


def test_the_parts_add_up(device):
    torch.manual_seed(1)
    weight, ids = torch.randn(30, 4, device=device), torch.randint(30, (5, 2), device=device)
    parts = [vocab_parallel_embedding(ids, weight[i : i + 10], i, i + 10) for i in (0, 10, 20)]
    assert torch.equal(sum(parts), weight[ids])


@pytest.mark.parametrize("split", [True, False])
def test_the_gradient_of_a_frequent_token_does_not_stop_growing(device, dtype, split):
    """5,000 times 1 in bf16 one after the other is 256."""
    if device == "npu":
        pytest.skip("the case: the simulator has the CPU's kernel; what hardware does is not known")
    weight = torch.zeros(4, 2, device=device, dtype=dtype, requires_grad=True)
    ids = torch.full((5000,), 2, device=device)
    vocab_parallel_embedding(ids, weight, 0, 4, split=split).sum().backward()
    assert weight.grad.tolist() == [[0.0] * 2, [0.0] * 2, [pytest.approx(5000, rel=4e-3)] * 2, [0.0] * 2]


def test_the_gradient_is_the_same_every_time(device, dtype):
    torch.manual_seed(1)
    ids, grad = torch.randint(20, (500, 2), device=device), torch.randn(500, 2, 8, device=device).to(dtype)
    results = []
    for _ in range(3):
        weight = torch.zeros(10, 8, device=device, dtype=dtype, requires_grad=True)
        vocab_parallel_embedding(ids, weight, 5, 15).backward(grad)
        results.append(weight.grad)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def buffered(dtype):
    """Return a table whose gradients go to a buffer, as a data-parallel wrapper gives it one."""
    table = torch.nn.Parameter(torch.randn(6, 4).to(dtype))
    table.main_grad = torch.ones(6, 4)
    gradients.may_take_rows(table)
    return table


def test_rows_are_added_to_the_buffer(dtype):
    """In fp32, a token that occurs often too; a token of another rank adds nothing."""
    table, ids = buffered(dtype), torch.tensor([[4, 2, 4], [9, 2, 4]])
    output = vocab_parallel_embedding(ids, table, 0, 6, keep_rows=gradients.keep_rows)
    grad = torch.randn(2, 3, 4).to(dtype)
    output.backward(grad)
    assert table.grad is None
    expected = torch.ones(6, 4)
    for row, part in zip(ids.flatten().tolist(), grad.reshape(-1, 4), strict=True):
        if row < 6:
            expected[row] += part
    torch.testing.assert_close(table.main_grad, expected)


def test_a_table_without_such_a_buffer_gets_its_gradient():
    """With --overlap-grad-reduce the wrapper waits for it, and may send the buffer at once."""
    table = torch.nn.Parameter(torch.randn(6, 4))
    table.main_grad = torch.zeros(6, 4)
    ids = torch.tensor([1, 1])
    vocab_parallel_embedding(ids, table, 0, 6, keep_rows=gradients.keep_rows).sum().backward()
    assert table.grad[1].tolist() == [2.0] * 4
    assert not table.main_grad.any()
