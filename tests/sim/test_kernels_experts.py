"""Choice of experts, permutation of tokens and grouped matrix products on the simulated NPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.sim.against_fp64 import DTYPES, compare
from tests.support.tolerances import assert_near

pytestmark = pytest.mark.simulated
few = settings(max_examples=10)
dtypes = st.sampled_from(DTYPES)


def npu(name: str):
    import torch_npu

    return getattr(torch_npu, name)


def sorted_copies(indices: Tensor) -> list[tuple[int, int]]:
    """Return (token, which of its experts) in the order of experts, then of tokens."""
    copies = [(int(indices[t, k]), t, k) for t in range(indices.size(0)) for k in range(indices.size(1))]
    return [(token, k) for _, token, k in sorted(copies)]


def random_indices(tokens: int, experts: int, topk: int) -> Tensor:
    return torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)])


@few
@given(dtypes, st.integers(1, 9), st.integers(1, 5), st.data())
def test_permute(dtype, tokens, experts, data):
    topk = data.draw(st.integers(1, experts))
    indices = random_indices(tokens, experts, topk)
    rows = [token for token, _ in sorted_copies(indices)]
    kept = data.draw(st.sampled_from([None, 0, 1, tokens * topk, -1]))
    rows = rows[:kept] if kept else rows
    compare(
        lambda x, i: npu("npu_moe_token_permute")(x, i, kept)[0],
        lambda x, i: x[rows],
        [torch.randn(tokens, 6), indices],
        dtype,
    )


def test_permute_of_one_expert_per_token_takes_a_vector():
    indices = torch.tensor([2, 0, 1, 0])
    tokens, positions = npu("npu_moe_token_permute")(torch.arange(8.0).view(4, 2).npu(), indices.npu())
    assert tokens.cpu()[:, 0].tolist() == [2.0, 6.0, 4.0, 0.0]
    assert positions.cpu().tolist() == [3, 0, 2, 1]
    assert positions.dtype == torch.int32


def positions_of(indices: Tensor) -> Tensor:
    """Return sorted_indices of the documentation: where the k-th copy of token t lies."""
    order = sorted_copies(indices)
    flat = [order.index((t, k)) for t in range(indices.size(0)) for k in range(indices.size(1))]
    return torch.tensor(flat, dtype=torch.int32)


@few
@given(dtypes, st.integers(1, 9), st.integers(1, 5), st.data())
def test_unpermute_with_probabilities(dtype, tokens, experts, data):
    topk = data.draw(st.integers(1, experts))
    positions = positions_of(random_indices(tokens, experts, topk))

    def formula(x, where, probs):
        return torch.stack(
            [sum(probs[t, k] * x[where[t * topk + k]] for k in range(topk)) for t in range(tokens)]
        )

    inputs = [torch.randn(tokens * topk, 6), positions, torch.rand(tokens, topk)]
    compare(npu("npu_moe_token_unpermute"), formula, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpermute_without_probabilities(dtype):
    positions = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    compare(npu("npu_moe_token_unpermute"), lambda x, p: x[p.long()], [torch.randn(4, 6), positions], dtype)


def test_permute_and_unpermute_are_inverse():
    indices = random_indices(7, 4, 2)
    x = torch.randn(7, 6)
    tokens, positions = npu("npu_moe_token_permute")(x.npu(), indices.npu())
    half = torch.full((7, 2), 0.5).npu()
    assert_near(npu("npu_moe_token_unpermute")(tokens, positions, half).cpu(), x.double(), torch.float32)


def test_the_older_gradients_agree_with_the_newer():
    indices = random_indices(5, 3, 2)
    positions = positions_of(indices).npu()
    grad, tokens, permuted = torch.randn(10, 4).npu(), torch.randn(5, 4).npu(), torch.randn(10, 4).npu()
    older = torch.ops.npu.npu_moe_token_permute_grad(tokens, grad, indices.npu(), positions)
    newer = torch.ops.npu.npu_moe_token_permute_grad_v2(grad, positions, 5, torch.float32, 2)
    assert torch.equal(older.cpu(), newer.cpu())
    probs, grad = torch.rand(5, 2).npu(), torch.randn(5, 4).npu()
    older = torch.ops.npu.npu_moe_token_unpermute_grad(permuted, grad, positions, probs)
    newer = torch.ops.npu.npu_moe_token_unpermute_grad_v2(
        grad, positions, 10, torch.float32, probs, permuted_tokens=permuted
    )
    for old, new in zip(older, newer, strict=True):
        assert torch.equal(old.cpu(), new.cpu())


def random_map(tokens: int, experts: int, topk: int) -> Tensor:
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    return chosen.scatter_(1, random_indices(tokens, experts, topk), True)


def rows_of_map(chosen: Tensor) -> list[tuple[int, int]]:
    """Return (token, expert) in the order of experts, then of tokens."""
    tokens, experts = chosen.shape
    return [(t, e) for e in range(experts) for t in range(tokens) if chosen[t, e]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("map_dtype", [torch.bool, torch.int8])
def test_permute_by_a_routing_map(dtype, map_dtype):
    chosen = random_map(6, 4, 2)
    rows = rows_of_map(chosen)

    def operation(x, routing, probs):
        return npu("npu_moe_token_permute_with_routing_map")(x, routing, probs=probs, num_out_tokens=12)[:2]

    def formula(x, routing, probs):
        return torch.stack([x[t] for t, _ in rows]), torch.stack([probs[t, e] for t, e in rows])

    compare(operation, formula, [torch.randn(6, 5), chosen.to(map_dtype), torch.rand(6, 4)], dtype)


def test_permute_by_a_routing_map_without_probabilities():
    chosen = random_map(6, 4, 2)
    rows = [token for token, _ in rows_of_map(chosen)]

    def operation(x, routing):
        return npu("npu_moe_token_permute_with_routing_map")(x, routing, num_out_tokens=12)[0]

    compare(operation, lambda x, routing: x[rows], [torch.randn(6, 5), chosen], torch.float32)


def test_probabilities_that_nothing_uses_get_no_gradient():
    """Torch_npu hands the kernel an undefined gradient then, and autograd takes an undefined one back."""
    rows, probs = torch.randn(6, 5).npu().requires_grad_(), torch.rand(6, 4).npu().requires_grad_()
    routing = random_map(6, 4, 2).npu()
    permute = npu("npu_moe_token_permute_with_routing_map")
    permute(rows, routing, probs=probs, num_out_tokens=12)[0].sum().backward()
    assert torch.equal(rows.grad.cpu(), torch.full((6, 5), 2.0))
    assert probs.grad is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpermute_by_a_routing_map(dtype):
    tokens, topk = 6, 2
    chosen = random_map(tokens, 4, topk)
    rows = rows_of_map(chosen)
    where = [rows.index((t, int(e))) for t in range(tokens) for e in chosen[t].nonzero()]

    def operation(x, positions, probs, routing):
        call = npu("npu_moe_token_unpermute_with_routing_map")
        return call(x, positions, [tokens, 5], probs=probs, routing_map=routing)

    def formula(x, positions, probs, routing):
        return torch.stack(
            [sum(probs[t, e] * x[i] for i, (row, e) in enumerate(rows) if row == t) for t in range(tokens)]
        )

    positions = torch.tensor(where, dtype=torch.int32)
    compare(
        operation, formula, [torch.randn(tokens * topk, 5), positions, torch.rand(tokens, 4), chosen], dtype
    )


def test_unpermute_by_a_routing_map_without_probabilities():
    positions = torch.tensor([2, 0, 3, 1], dtype=torch.int32)

    def operation(x, where):
        return npu("npu_moe_token_unpermute_with_routing_map")(x, where, [2, 5])

    compare(
        operation,
        lambda x, w: x[w.long()].view(2, 2, 5).sum(1),
        [torch.randn(4, 5), positions],
        torch.float32,
    )


def test_a_rank_may_have_no_tokens():
    none, indices = torch.empty(0, 4).npu().requires_grad_(), torch.empty(0, 2, dtype=torch.int64).npu()
    tokens, positions = npu("npu_moe_token_permute")(none, indices)
    result = npu("npu_moe_token_unpermute")(tokens, positions, torch.empty(0, 2).npu())
    assert result.shape == (0, 4)
    result.sum().backward()
    assert none.grad.shape == (0, 4)
    routing = torch.empty(0, 3, dtype=torch.bool).npu()
    tokens, _, positions = npu("npu_moe_token_permute_with_routing_map")(none, routing, num_out_tokens=0)
    result = npu("npu_moe_token_unpermute_with_routing_map")(tokens, positions, [0, 4])
    assert result.shape == (0, 4)


# --- the router ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [{}, {"k_group": 2, "group_count": 4, "group_select_mode": 1}], ids=str)
def test_experts_by_sigmoid_scores(dtype, groups):
    """The weights are divided by their sum, the bias is for the choice alone; torch_npu's own gradient."""
    logits = torch.stack([torch.randperm(16) for _ in range(5)]) * 0.37 - 2.8
    bias = torch.linspace(-0.1, 0.2, 16)
    chosen = []

    def operation(x, b):
        weights, experts, scores = npu("npu_moe_gating_top_k")(
            x, 4, bias=b, norm_type=1, out_flag=True, routed_scaling_factor=2.5, **groups
        )
        chosen[:] = [experts.cpu().long(), scores]
        return weights

    def formula(x, b):
        picked = x.sigmoid().gather(1, chosen[0])
        return 2.5 * picked / picked.sum(-1, keepdim=True)

    compare(operation, formula, [logits, bias], dtype, differentiable=False)
    x = logits.to(dtype).npu().requires_grad_()
    double = logits.to(dtype).double().requires_grad_()
    grad = torch.randn(5, 4).to(dtype)
    operation(x, bias.to(dtype).npu()).backward(grad.npu())
    formula(double, bias).backward(grad.double())
    assert_near(x.grad.cpu(), double.grad, dtype)
    scores = logits.to(dtype).double().sigmoid() + bias.to(dtype).double()
    assert_near(chosen[1].cpu(), scores - bias.to(dtype).double(), torch.float32)
    if groups:
        members = scores.view(5, 4, 4)
        best = members.topk(2, dim=-1).values.sum(-1).topk(2, dim=-1).indices
        for row, allowed in zip(chosen[0] // 4, best, strict=True):
            assert set(row.tolist()) <= set(allowed.tolist())
    else:
        assert torch.equal(chosen[0], scores.topk(4, dim=-1).indices)


def test_experts_by_softmax_scores_have_no_gradient():
    logits = torch.stack([torch.randperm(8) for _ in range(5)]) * 0.37
    weights, experts, nothing = npu("npu_moe_gating_top_k")(logits.npu(), 2)
    right = logits.double().softmax(-1).topk(2, dim=-1)
    assert_near(weights.cpu(), right.values, torch.float32)
    assert torch.equal(experts.cpu().long(), right.indices)
    assert nothing.numel() == 0
    x = logits.npu().requires_grad_()
    weights, _, _ = npu("npu_moe_gating_top_k")(x, 2, out_flag=True)
    with pytest.raises(RuntimeError, match="norm_type"):
        weights.sum().backward()


# --- grouped matrix products ---

GROUPS = [2, 0, 4, 1]
ENDS = torch.tensor(GROUPS).cumsum(0)


def grouped(x: Tensor, weights, *biases: Tensor) -> Tensor:
    products = [part @ weight for part, weight in zip(x.split(GROUPS), weights, strict=True)]
    return torch.cat([p + b for p, b in zip(products, biases, strict=True)] if biases else products)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("list_type", [0, 1])
def test_rows_divided_among_one_tensor_of_weights(dtype, list_type):
    sizes = ENDS if list_type == 0 else torch.tensor(GROUPS)

    def operation(x, weight, group_list):
        return npu("npu_grouped_matmul")(
            [x], [weight], group_list=group_list, split_item=3, group_type=0, group_list_type=list_type
        )[0]

    inputs = [torch.randn(7, 6), torch.randn(4, 6, 5), sizes]
    compare(operation, lambda x, w, s: grouped(x, w), inputs, dtype, differentiable=False)


def test_rows_divided_among_transposed_weights():
    def operation(x, weight, group_list):
        transposed = weight.transpose(1, 2)
        return npu("npu_grouped_matmul")(
            [x], [transposed], group_list=group_list, split_item=2, group_type=0
        )[0]

    inputs = [torch.randn(7, 6), torch.randn(4, 5, 6), ENDS]
    formula = lambda x, w, s: grouped(x, w.transpose(1, 2))  # noqa: E731
    compare(operation, formula, inputs, torch.float32, differentiable=False)


def test_rows_divided_among_a_list_of_weights_with_bias():
    inputs = [torch.randn(7, 6), *torch.randn(4, 6, 5), *torch.randn(4, 5), ENDS]

    def operation(x, *rest):
        weights, biases, ends = list(rest[:4]), list(rest[4:8]), rest[8]
        return npu("npu_grouped_matmul")(
            [x], weights, bias=biases, group_list=ends, split_item=2, group_type=0
        )[0]

    formula = lambda x, *rest: grouped(x, rest[:4], *rest[4:8])  # noqa: E731
    compare(operation, formula, inputs, torch.float32, differentiable=False)


def test_lists_of_equal_length_multiply_in_pairs():
    inputs = [torch.randn(2, 3, 6), torch.randn(4, 2, 4), torch.randn(6, 5), torch.randn(4, 3)]

    def operation(a, b, v, w):
        return npu("npu_grouped_matmul")([a, b], [v, w], group_type=-1, split_item=0)

    compare(operation, lambda a, b, v, w: [a @ v, b @ w], inputs, torch.bfloat16, differentiable=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_summed_axis_divided_is_the_gradient_of_the_weights(dtype):
    def operation(x, grad, group_list):
        return npu("npu_grouped_matmul")([x.t()], [grad], group_list=group_list, split_item=3, group_type=2)[
            0
        ]

    def formula(x, grad, group_list):
        return torch.stack([a.T @ b for a, b in zip(x.split(GROUPS), grad.split(GROUPS), strict=True)])

    compare(operation, formula, [torch.randn(7, 6), torch.randn(7, 5), ENDS], dtype, differentiable=False)


@pytest.mark.parametrize("joined", [False, True])
def test_groups_given_as_a_list_of_int(joined):
    inputs = [torch.randn(7, 6), *torch.randn(3, 6, 5)]
    ends = [2, 6, 7]

    def operation(x, *weights):
        return npu("npu_grouped_matmul")([x], list(weights), group_list=ends, split_item=3 if joined else 0)

    def formula(x, *weights):
        products = [part @ w for part, w in zip(x.split([2, 4, 1]), weights, strict=True)]
        return [torch.cat(products)] if joined else products

    compare(operation, formula, inputs, torch.float32, differentiable=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("list_type", [0, 1])
@pytest.mark.parametrize("name", ["npu_grouped_matmul_add", "npu_grouped_matmul_add_"])
def test_grouped_products_are_added_in_fp32(name, list_type, dtype):
    total = torch.randn(4, 6, 5)
    x, grad = torch.randn(7, 6).to(dtype), torch.randn(7, 5).to(dtype)
    sizes = ENDS if list_type == 0 else torch.tensor(GROUPS)
    device_total = total.npu()
    operation = getattr(torch.ops.npu, name)
    result = operation(device_total, x.npu(), grad.npu(), sizes.npu(), group_list_type=list_type)
    pairs = zip(x.double().split(GROUPS), grad.double().split(GROUPS), strict=True)
    expected = total.double() + torch.stack([a.T @ b for a, b in pairs])
    assert_near(result.cpu(), expected, torch.float32)
    unchanged = torch.equal(device_total.cpu(), total)
    assert unchanged == (name == "npu_grouped_matmul_add")
