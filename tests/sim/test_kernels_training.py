"""The fused AdamW step and the fused cross entropy on the simulated NPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.against_fp64 import DTYPES, compare
from tests.support.tolerances import assert_near

pytestmark = pytest.mark.simulated


@settings(max_examples=10)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.sampled_from([1e-3, 0.1]),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
)
def test_adam_w_steps_like_torch(shape, lr, decay, maximize):
    import torch_npu

    weights = torch.randn(shape, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.AdamW([weights], lr, (0.8, 0.95), 1e-8, decay, maximize=maximize)
    var, m, v = weights.detach().float().npu(), torch.zeros(shape).npu(), torch.zeros(shape).npu()
    for step in range(1, 4):
        grad = torch.randn(shape)
        weights.grad = grad.double()
        optimizer.step()
        torch_npu.npu_apply_adam_w(
            0.8 ** (step - 1),  # the powers of the step before
            0.95 ** (step - 1),
            lr,
            decay,
            0.8,
            0.95,
            1e-8,
            grad.npu(),
            None,
            False,
            maximize,
            out=(var, m, v),
        )
    state = optimizer.state[weights]
    for got, wanted in ((var, weights.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        assert_near(got.cpu(), wanted, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adam_w_in_16_bits_computes_in_fp32_and_rounds_at_the_end(dtype):
    import torch_npu

    host = [torch.randn(64).to(dtype), torch.randn(64).to(dtype), torch.rand(64).to(dtype)]
    grad = torch.randn(64).to(dtype)
    var, m, v = (x.npu() for x in host)
    torch_npu.npu_apply_adam_w(
        0.9, 0.99, 0.01, 0.1, 0.9, 0.99, 1e-6, grad.npu(), None, False, False, out=(var, m, v)
    )
    weights, momentum, variance, g = (x.double() for x in (*host, grad))
    momentum = 0.9 * momentum + 0.1 * g
    variance = 0.99 * variance + 0.01 * g * g
    update = momentum / (1 - 0.9**2) / ((variance / (1 - 0.99**2)).sqrt() + 1e-6)
    for got, wanted in ((var, weights - 0.01 * update - 0.001 * weights), (m, momentum), (v, variance)):
        torch.testing.assert_close(
            got.cpu().double(), wanted, rtol=2 ** (-8 if dtype == torch.bfloat16 else -10), atol=1e-6
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(dtype, reduction):
    import torch_npu

    targets = torch.tensor([0, 4, 2, 2, 1, 3])

    def formula(logits, targets):
        losses = logits.logsumexp(-1) - logits[torch.arange(6), targets]
        reduced = {"mean": losses.mean(), "sum": losses.sum(), "none": losses}[reduction]
        return reduced.view(-1)

    compare(
        lambda x, t: torch_npu.npu_cross_entropy_loss(x, t, reduction=reduction)[0],
        formula,
        [torch.randn(6, 5), targets],
        dtype,
    )


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_cross_entropy_with_weights_and_an_ignored_class(reduction):
    import torch_npu

    targets, weight = torch.tensor([0, 4, 2, 2, 1, 3]), torch.tensor([1.0, 0.5, 0.25, 1.0, 0.75])

    def operation(x, t):
        return torch_npu.npu_cross_entropy_loss(x, t, weight.npu(), reduction, ignore_index=2)[0]

    def formula(x, t):
        losses = (x.logsumexp(-1) - x[torch.arange(6), t]) * weight[t].double() * (t != 2)
        return losses.sum().view(1) if reduction == "sum" else losses

    compare(operation, formula, [torch.randn(6, 5), targets], torch.float32)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_with_every_option_agrees_with_torch(reduction):
    import torch_npu

    targets, weight = torch.tensor([0, 4, 2, 2, 1, 3]), torch.tensor([1.0, 0.5, 0.25, 1.0, 0.75])

    def operation(x, t):
        return torch_npu.npu_cross_entropy_loss(x, t, weight.npu(), reduction, 2, 0.1)[0]

    def formula(x, t):
        options = {"reduction": reduction, "ignore_index": 2, "label_smoothing": 0.1}
        return F.cross_entropy(x, t, weight.double(), **options).view(-1)

    compare(operation, formula, [torch.randn(6, 5), targets], torch.float32, differentiable=False)


def test_cross_entropy_also_returns_log_probabilities():
    import torch_npu

    x = torch.randn(6, 5)
    outputs = torch_npu.npu_cross_entropy_loss(x.npu(), torch.zeros(6, dtype=torch.int64).npu())
    assert_near(outputs[1].cpu(), x.double().log_softmax(-1), torch.float32)
    assert outputs[0].shape == (1,)
    assert outputs[2].numel() == outputs[3].numel() == 0


@pytest.mark.parametrize("rows", [5, 16])
def test_output_layer_and_loss_over_a_part_of_the_vocabulary(rows):
    """The three kernels in their two branches; some targets are of another rank."""
    import torch_npu

    # logits around 1, as a model's: the rounding of the softmax, kept in bf16 by one branch, grows with them
    weight, x = (torch.randn(130, 24) / 24**0.5).bfloat16(), torch.randn(rows, 24).bfloat16()
    target, grad = torch.randint(100, 270, (rows,)), torch.rand(rows)
    inside = (target >= 100) & (target < 230)
    doubles = [each.double().requires_grad_() for each in (x, weight)]
    logits = doubles[0] @ doubles[1].t()
    largest = logits.detach().amax(1)
    there = logits.gather(1, (target - 100).masked_fill(~inside, 0)[:, None]).squeeze(1)
    losses = logits.logsumexp(1) - torch.where(inside, there, largest)
    expected = torch.autograd.grad(losses @ grad.double(), doubles)
    statistics = torch_npu.npu_fused_linear_online_max_sum(
        x.npu(), weight.npu(), target.npu(), 100, 229, True
    )
    largest, sums, predicted, mask, index, whole = statistics
    assert mask.shape == ((rows + 7) // 8,)
    loss, softmax = torch_npu.npu_fused_cross_entropy_loss_with_max_sum(
        largest, sums, predicted, vocab_parallel_logits=whole
    )
    assert_near(loss, losses, torch.float32)
    for statistics in ({"logits_max": largest, "sum_exp_logits": sums}, {"softmax": softmax}):
        ours = torch_npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
            grad.npu(), x.npu(), weight.npu(), mask, index, **statistics
        )
        for got, wanted in zip(ours, expected, strict=True):
            assert_near(got, wanted, torch.bfloat16)
