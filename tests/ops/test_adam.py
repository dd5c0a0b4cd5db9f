"""FusedAdam: the papers in fp64, apex's and torch's state dicts, 16-bit parameters, what it refuses."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_npu.ops.optimizers import adam_update
from megatron_npu.ops.optimizers.adam import FusedAdam
from megatron_npu.ops.optimizers.sgd import FusedSGD

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
SHAPES = ((5, 3), (7,), (1,), (33, 17))


def parameters(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def give_gradients(weights, step, dtype=None):
    generator = torch.Generator().manual_seed(step)
    for weight in weights:
        grad = torch.randn(weight.shape, generator=generator)
        weight.grad = grad.to(weight.device, dtype or weight.dtype)


def written_out(starts, gradients, decoupled, corrected):
    """Adam in fp64: the list of parameters after the steps whose gradients are given."""
    values = [s.detach().double().cpu() for s in starts]
    first, second = ([torch.zeros_like(v) for v in values] for _ in range(2))
    for step, grads in enumerate(gradients, 1):
        for i, grad in enumerate(grads):
            grad = grad.double().cpu()
            if decoupled:
                values[i] = values[i] * (1 - LR * DECAY)
            else:
                grad = grad + DECAY * values[i]
            first[i] = BETAS[0] * first[i] + (1 - BETAS[0]) * grad
            second[i] = BETAS[1] * second[i] + (1 - BETAS[1]) * grad**2
            m = first[i] / (1 - BETAS[0] ** step if corrected else 1)
            v = second[i] / (1 - BETAS[1] ** step if corrected else 1)
            values[i] = values[i] - LR * m / (v.sqrt() + EPS)
    return values


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("implementation", ["bound", "reference"])
def test_follows_the_papers(device, decoupled, corrected, implementation):
    if implementation == "reference":
        adam_update.update_adam.bind("nowhere")
    weights = parameters(device)
    starts = [w.detach().clone() for w in weights]
    optimizer = FusedAdam(
        weights,
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=DECAY,
        adam_w_mode=decoupled,
        bias_correction=corrected,
    )
    gradients = []
    for step in range(5):
        give_gradients(weights, step)
        gradients.append([w.grad.clone() for w in weights])
        optimizer.step()
    for a, b in zip(weights, written_out(starts, gradients, decoupled, corrected), strict=True):
        torch.testing.assert_close(a.detach().double().cpu(), b, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("master", [True, False])
def test_16_bit_parameters(device, dtype, master):
    """Moments in fp32; with master weights the sum of small steps is not lost to rounding."""
    weights = parameters(device, dtype)
    starts = [w.detach().clone() for w in weights]
    optimizer = FusedAdam(weights, lr=LR, betas=BETAS, weight_decay=DECAY, master_weights=master)
    gradients = []
    for step in range(8):
        give_gradients(weights, step)
        gradients.append([w.grad.clone() for w in weights])
        optimizer.step()
    assert all(s["exp_avg"].dtype is torch.float32 for s in optimizer.state.values())
    for weight, right in zip(weights, written_out(starts, gradients, True, True), strict=True):
        if master:
            kept = optimizer.state[weight]["master_param"]
            torch.testing.assert_close(kept.double().cpu(), right, rtol=0, atol=4e-6)
            assert torch.equal(weight.detach(), kept.to(dtype))
        else:
            steps = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(weight.detach().double().cpu(), right, rtol=steps, atol=steps)


def test_gradient_in_another_dtype_or_with_other_strides(device):
    """torch's CPU kernel takes strides for equal without looking; a gradient may well be transposed."""
    weights = [torch.nn.Parameter(torch.randn(6, 4, device=device).t()) for _ in range(2)]
    twins = [torch.nn.Parameter(w.detach().clone(memory_format=torch.contiguous_format)) for w in weights]
    grads = [torch.randn(4, 6, device=device) for _ in weights]
    for weight, twin, grad in zip(weights, twins, grads, strict=True):
        weight.grad, twin.grad = grad, grad.clone()
    FusedAdam(weights, lr=LR).step()
    FusedAdam(twins, lr=LR).step()
    for weight, twin in zip(weights, twins, strict=True):
        assert weight.stride() == (1, 4)
        torch.testing.assert_close(weight, twin)


def run(device, steps, saved=None, dtype=torch.float32, **options):
    weights = parameters(device, dtype)
    optimizer = FusedAdam(weights, lr=LR, weight_decay=DECAY, **options)
    first = 0
    if saved:
        first, values, state = saved
        for weight, value in zip(weights, values, strict=True):
            weight.data.copy_(value)
        optimizer.load_state_dict(state)
    for step in range(first, steps):
        give_gradients(weights, step)
        optimizer.step()
    return steps, [w.detach().clone() for w in weights], copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "master_weights": True}],
    ids=["fp32", "bf16", "bf16-master"],
)
def test_resumes_to_the_bit(device, options):
    whole, resumed = run(device, 6, **options), run(device, 6, run(device, 3, **options), **options)
    assert all(torch.equal(a, b) for a, b in zip(whole[1], resumed[1], strict=True))
    assert whole[2]["param_groups"] == resumed[2]["param_groups"]  # torch's load adds nothing to them
    assert resumed[2]["param_groups"][0]["step"] == 6


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_state_dicts_of_torch(device, kind):
    """Three steps with torch's, three with ours, against six steps of torch's."""
    options = {"lr": LR, "weight_decay": DECAY}

    def ours(weights):
        return FusedAdam(weights, **options, adam_w_mode=kind is torch.optim.AdamW)

    def theirs(weights):
        return kind(weights, **options)

    def three_and_three(first, second):
        weights = parameters(device)
        one = first(weights)
        for step in range(3):
            give_gradients(weights, step)
            one.step()
        other = second(weights)
        other.load_state_dict(one.state_dict())
        for step in range(3, 6):
            give_gradients(weights, step)
            other.step()
        return weights

    right, actual = (three_and_three(theirs, second) for second in (theirs, ours))
    for a, b in zip(actual, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_state_dict_has_the_form_of_apex(device):
    saved = run(device, 2)[2]
    assert set(saved["state"][0]) == {"exp_avg", "exp_avg_sq"}
    assert set(saved["param_groups"][0]) == {
        "lr",
        "bias_correction",
        "betas",
        "eps",
        "weight_decay",
        "step",
        "params",
    }


def test_refuses_a_state_dict_at_several_steps(device):
    weights = parameters(device)
    saved = torch.optim.AdamW(weights)
    give_gradients(weights, 0)
    saved.step()
    saved.state[weights[0]]["step"] += 1
    with pytest.raises(
        ValueError,
        match=r"all parameters of a group must be at the same step, but they are at steps \[1, 2\]",
    ):
        FusedAdam(weights).load_state_dict(saved.state_dict())


def test_parameters_without_gradient_are_left_alone(device):
    weights = parameters(device)
    give_gradients(weights, 0)
    weights[1].grad = None
    before = weights[1].detach().clone()
    optimizer = FusedAdam(weights, lr=LR, weight_decay=DECAY)
    optimizer.step()
    assert torch.equal(weights[1], before)
    assert weights[1] not in optimizer.state


def test_takes_apex_positional_arguments():
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(1))], 0.5, False, (0.8, 0.9), 1e-6, False, 0.01)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["bias_correction"], group["betas"]) == (0.5, False, (0.8, 0.9))
    assert (group["eps"], optimizer.adam_w_mode, group["weight_decay"]) == (1e-6, False, 0.01)


@pytest.mark.parametrize("option", [{"amsgrad": True}, {"capturable": True}, {"fuse_unscale": True}])
def test_refuses_what_it_cannot_do(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], **option)


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_refuses_sparse_gradients(kind):
    weight = torch.nn.Parameter(torch.ones(4, 2))
    torch.nn.functional.embedding(torch.tensor([1, 3]), weight, sparse=True).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        kind([weight], lr=0.1).step()


def test_bias_correction_off_equals_a_large_step(device):
    """What the fused kernels are told in place of a switch that they do not have."""
    assert 1 - 0.9**math.inf == 1.0


def test_zero_grad_follows_the_constructor(device):
    weights = parameters(device)
    for drop in (True, False):
        give_gradients(weights, 0)
        FusedAdam(weights, set_grad_none=drop).zero_grad()
        assert all((w.grad is None) if drop else not w.grad.any() for w in weights)


def test_closure_and_removed_arguments(device):
    weights = parameters(device)
    optimizer = FusedAdam(weights)

    def closure():
        optimizer.zero_grad()
        loss = sum(w.square().sum() for w in weights)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > optimizer.step(closure).item()
    with pytest.raises(ValueError, match="scale"):
        optimizer.step(scale=2.0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
@pytest.mark.parametrize(
    "make",
    [
        lambda weights: FusedAdam(weights, LR, adam_w_mode=False, weight_decay=DECAY, master_weights=True),
        lambda weights: FusedAdam(weights, LR, weight_decay=DECAY, set_grad_none=False),
        lambda weights: FusedSGD(weights, LR, 0.9, weight_decay=DECAY, wd_after_momentum=True),
    ],
)
def test_a_copy_goes_on_as_the_original_does(device, make, duplicate):
    weights = parameters(device, torch.bfloat16)
    optimizer = make(weights)
    give_gradients(weights, 1)
    optimizer.step()
    other = duplicate(optimizer)
    copies = other.param_groups[0]["params"]
    for optimized, values in ((optimizer, weights), (other, copies)):
        give_gradients(values, 2)
        optimized.step()
        optimized.zero_grad()
    for value, twin in zip(weights, copies, strict=True):
        assert value is not twin
        assert torch.equal(value, twin)
        assert (value.grad is None) == (twin.grad is None)


def test_a_rank_has_the_state_of_what_it_holds_nothing_of():
    """Megatron's FSDP gives it no gradient of that; in a save all ranks exchange the shapes of all states."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        tensors = [distribute_tensor(torch.ones(rows, 4), mesh, [Shard(0)]) for rows in (1, 2, 1)]
        nothing, something, frozen = map(torch.nn.Parameter, tensors)
        frozen.requires_grad_(False)
        something.grad = torch.ones_like(something)
        assert nothing.to_local().numel() == 0
        optimizer = FusedAdam([nothing, something, frozen])
        optimizer.step()
        assert list(optimizer.state) == [nothing, something]  # all ranks in this order
        shapes = {name: state.shape for name, state in optimizer.state[nothing].items()}
        assert shapes == {"exp_avg": (1, 4), "exp_avg_sq": (1, 4)}
    finally:
        dist.destroy_process_group()
