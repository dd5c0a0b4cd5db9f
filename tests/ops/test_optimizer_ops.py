"""FusedAdam, the multi-tensor functions and the accumulated weight gradient."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from megatron_npu.ops.adam import FusedAdam
from megatron_npu.ops.multi_tensor import multi_tensor_l2norm, multi_tensor_scale
from megatron_npu.ops.weight_gradient import accumulate_weight_gradient


def parameters(device):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in ((5, 3), (7,), (1,))]


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_follows_the_paper(device, decoupled):
    """Five steps against Adam written out in fp64."""
    lr, beta1, beta2, eps, decay = 1e-2, 0.9, 0.95, 1e-8, 0.1
    ours = parameters(device)
    optimizer = FusedAdam(
        ours, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, adam_w_mode=decoupled
    )
    right = [p.detach().double() for p in ours]
    first = [torch.zeros_like(p) for p in right]
    second = [torch.zeros_like(p) for p in right]
    for step in range(1, 6):
        for i, parameter in enumerate(ours):
            parameter.grad = torch.randn_like(parameter)
            grad = parameter.grad.double()
            if decoupled:
                right[i] *= 1 - lr * decay
            else:
                grad = grad + decay * right[i]
            first[i] = beta1 * first[i] + (1 - beta1) * grad
            second[i] = beta2 * second[i] + (1 - beta2) * grad**2
            corrected = second[i].sqrt() / math.sqrt(1 - beta2**step) + eps
            right[i] -= lr * first[i] / (1 - beta1**step) / corrected
        optimizer.step()
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a.detach().double(), b, rtol=0, atol=2e-6)


def test_adam_resumes_bitwise_from_its_state_dict(device):
    def run(steps, saved=None):
        weights = parameters(device)
        optimizer = FusedAdam(weights, lr=1e-2, weight_decay=0.1)
        first = 0
        if saved:
            first, values, state = saved
            for weight, value in zip(weights, values, strict=True):
                weight.data.copy_(value)
            optimizer.load_state_dict(state)
        for step in range(first, steps):
            generator = torch.Generator().manual_seed(step)
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator).to(device)
            optimizer.step()
        return steps, [w.detach().clone() for w in weights], copy.deepcopy(optimizer.state_dict())

    whole, resumed = run(6), run(6, run(3))
    assert all(torch.equal(a, b) for a, b in zip(whole[1], resumed[1], strict=True))
    assert whole[2]["param_groups"][0]["step"] == resumed[2]["param_groups"][0]["step"] == 6


@pytest.mark.parametrize("option", [{"amsgrad": True}, {"bias_correction": False}, {"capturable": True}])
def test_adam_refuses_what_it_cannot_do(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], **option)


def test_l2norm(device):
    tensors = [torch.randn(n, device=device) for n in (1, 1000, 3)]
    norm, each = multi_tensor_l2norm(0, None, [tensors], True)
    assert norm.shape == (1,)
    assert norm.item() == pytest.approx(torch.cat(tensors).double().norm().item(), rel=1e-6)
    assert each.tolist() == pytest.approx([t.double().norm().item() for t in tensors], rel=1e-6)
    assert multi_tensor_l2norm(0, None, [tensors])[1] is None


@pytest.mark.parametrize("in_place", [True, False])
def test_scale(device, in_place):
    sources = [torch.randn(n, device=device) for n in (4, 9)]
    expected = [s * 0.5 for s in sources]
    kept = [s.clone() for s in sources]
    targets = sources if in_place else [torch.empty_like(s) for s in sources]
    multi_tensor_scale(0, None, [sources, targets], 0.5)
    assert all(map(torch.equal, targets, expected))
    if not in_place:
        assert all(map(torch.equal, sources, kept))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_accumulates(device, dtype):
    x, grad = torch.randn(6, 2, 8, device=device).to(dtype), torch.randn(6, 2, 5, device=device).to(dtype)
    main_grad = torch.ones(5, 8, device=device)
    accumulate_weight_gradient(x, grad, main_grad)
    expected = 1 + torch.einsum("sbo,sbi->oi", grad.double(), x.double())
    limit = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(main_grad.double(), expected, rtol=0, atol=limit)
