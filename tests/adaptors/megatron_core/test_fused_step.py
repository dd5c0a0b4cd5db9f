"""Adam's step with clipping and rounding in it, as a GPU takes it, around stand-ins for upstream."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_npu.adaptors.megatron_core.optimizers import fused_step
from megatron_npu.ops.optimizers import adam_update
from megatron_npu.ops.optimizers.adam import FusedAdam


def update(rows, step, factor):
    """The kernel's work in torch's operations."""
    for row in rows:
        row.weight.sub_(row.grad * factor)
        if row.copy is not None:
            row.copy.copy_(row.weight)


@pytest.fixture
def optimizer(monkeypatch):
    """What Megatron's mixed-precision optimizer is to the adaptor: bf16 weights, fp32 main weights, Adam."""
    monkeypatch.setattr(adam_update, "has_kernel", lambda _: True)
    monkeypatch.setattr(adam_update, "update_by_kernel", update)
    torch.manual_seed(0)
    models = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((4, 3), (5,))]
    mains = [torch.nn.Parameter(model.detach().float()) for model in models]
    for main in mains:
        main.grad = torch.randn_like(main)
    return SimpleNamespace(
        optimizer=FusedAdam(mains, lr=1.0),
        float16_groups=[models[:1], models[1:]],
        fp32_from_float16_groups=[mains[:1], mains[1:]],
    )


def mains_of(optimizer):
    return [main for mains in optimizer.fp32_from_float16_groups for main in mains]


def take_step(optimizer, clip=None):
    """As upstream: clip, step, copy. Return which of upstream's own clipping and copying ran."""
    ran = []
    if clip is not None:
        fused_step.clip_in_the_step(lambda *_: ran.append("clip"), mains_of(optimizer), *clip)

    def upstream(self):
        self.optimizer.step()
        fused_step.copy_what_is_left(lambda _: ran.append("copy"), self)
        return True

    assert fused_step.step_with_copies(upstream, optimizer)
    return ran


def test_a_step_rounds_weights_and_nothing_is_copied_again(optimizer):
    assert take_step(optimizer) == []
    for models, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
        assert all(torch.equal(model, main.bfloat16()) for model, main in zip(models, mains, strict=True))
    ran = []
    fused_step.copy_what_is_left(ran.append, optimizer)  # outside of a step, as after a load
    assert ran == [optimizer]


def test_gradients_are_clipped_in_the_step(optimizer):
    assert take_step(optimizer, (1.0, 4.0)) == ["clip"]  # nobody knows yet whose parameters they are
    before = [main.detach().clone() for main in mains_of(optimizer)]
    grads = [main.grad.clone() for main in mains_of(optimizer)]
    assert take_step(optimizer, (1.0, 4.0)) == []
    for main, old, grad in zip(mains_of(optimizer), before, grads, strict=True):
        torch.testing.assert_close(main.detach(), old - grad / (4.0 + 1e-6))
        assert torch.equal(main.grad, grad)
    before = [main.detach().clone() for main in mains_of(optimizer)]
    assert take_step(optimizer, (4.0, 1.0)) == []  # small enough; nothing is left of the step before
    for main, old, grad in zip(mains_of(optimizer), before, grads, strict=True):
        torch.testing.assert_close(main.detach(), old - grad)


def test_parameters_of_somebody_else_are_clipped_by_upstream(optimizer):
    take_step(optimizer)
    mains = mains_of(optimizer)
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    for parameters, last in ((mains[:1], False), ([*mains, other], False), (mains, True)):
        ran = []
        fused_step.clip_in_the_step(lambda *_, ran=ran: ran.append(1), parameters, 1.0, 4.0, last)
        assert ran == [1]
    assert optimizer.optimizer._factor == 1.0


def test_without_the_kernel_all_is_upstreams(optimizer, monkeypatch):
    monkeypatch.setattr(adam_update, "has_kernel", lambda _: False)
    assert take_step(optimizer) == ["copy"]


@pytest.fixture
def looks(monkeypatch):
    """Return the tensors that were looked at, whether the kernel takes them."""
    found = []
    monkeypatch.setattr(adam_update, "takes", lambda tensors: found.append(tensors) or True)
    return found


def test_a_step_looks_again_at_nothing_that_stands(optimizer, looks):
    take_step(optimizer)
    copies = fused_step._copies(
        optimizer.optimizer, optimizer.float16_groups, optimizer.fp32_from_float16_groups
    )
    assert len(looks) == 2
    for main in mains_of(optimizer):
        main.grad = torch.randn_like(main)  # another tensor in each step
    before = [main.detach() - main.grad for main in mains_of(optimizer)]
    take_step(optimizer)
    assert len(looks) == 2
    assert all(map(torch.equal, mains_of(optimizer), before))
    groups = (optimizer.float16_groups, optimizer.fp32_from_float16_groups)
    assert fused_step._copies(optimizer.optimizer, *groups) is copies


@pytest.mark.parametrize("change", ["loaded", "moment", "gradient", "weight"])
def test_what_has_changed_is_looked_at_again(change, optimizer, looks):
    take_step(optimizer)
    adam, (main, _) = optimizer.optimizer, mains_of(optimizer)
    if change == "loaded":
        adam.load_state_dict(adam.state_dict())
    elif change == "moment":
        adam.state[main]["exp_avg"] = adam.state[main]["exp_avg"].clone()
    elif change == "gradient":
        main.grad = main.grad.t().contiguous().t()
    else:
        optimizer.float16_groups[0] = [torch.nn.Parameter(torch.zeros(4, 3).bfloat16())]
    looks.clear()
    assert take_step(optimizer) == []
    assert len(looks) == (2 if change == "loaded" else 1)
    model = optimizer.float16_groups[0][0]
    assert torch.equal(model, main.bfloat16())
