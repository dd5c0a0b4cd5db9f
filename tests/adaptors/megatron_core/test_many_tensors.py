"""A step whose launches do not grow with the number of parameters, and its numbers."""

from __future__ import annotations

import contextlib

import pytest
import torch

from megatron_npu.adaptors.shared import optimizer
from tests.adaptors.megatron_core.conftest import make_ddp
from tests.support.comparison import here

pytestmark = pytest.mark.usefixtures("single_process")


def _backward(model, seed):
    torch.manual_seed(seed)
    x = torch.randn(5, 8, dtype=torch.bfloat16).to(here())
    model(x).float().square().sum().backward()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fp32", [False, True])
def test_gradients_of_two_passes_add_up_to_the_bit(fp32, overlap):
    model = make_ddp(grad_reduce_in_fp32=fp32, overlap_grad_reduce=overlap)
    plain = [p.detach().clone().requires_grad_() for p in model.parameters()]
    expected = [torch.zeros_like(p, dtype=torch.float32 if fp32 else p.dtype) for p in plain]
    for seed in (3, 4):
        torch.manual_seed(seed)
        x = torch.randn(5, 8, dtype=torch.bfloat16).to(here())
        names = [name for name, _ in model.module.named_parameters()]
        output = torch.func.functional_call(model.module, dict(zip(names, plain, strict=True)), (x,))
        for total, grad in zip(
            expected, torch.autograd.grad(output.float().square().sum(), plain), strict=True
        ):
            total += grad
        with model.no_sync() if seed == 3 else contextlib.nullcontext():
            _backward(model, seed)
    model.finish_grad_sync()
    for parameter, total in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter.main_grad, total)


def _steps(model, distributed):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=0.1, clip_grad=1e-3, bf16=True, params_dtype=torch.bfloat16,
        use_distributed_optimizer=distributed,
    )  # fmt: skip
    steps = get_megatron_optimizer(config, [model])
    for seed in (3, 4):
        model.zero_grad_buffer()
        steps.zero_grad()
        _backward(model, seed)
        model.finish_grad_sync()
        yield steps.step


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("fp32", [False, True])
def test_copies_in_one_call_are_the_same_to_the_bit(fp32, distributed, monkeypatch):
    results = []
    for together in (optimizer.CopiesTogether, contextlib.nullcontext):
        monkeypatch.setattr(optimizer, "CopiesTogether", together)
        model = make_ddp(2, grad_reduce_in_fp32=fp32, use_distributed_optimizer=distributed)
        before = [p.detach().clone() for p in model.parameters()]
        for step in _steps(model, distributed):
            assert step()[0]
        results.append([p.detach().clone() for p in model.parameters()])
        assert not any(map(torch.equal, before, results[-1]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("fp32", [False, True])
def test_launches_do_not_grow_with_the_number_of_parameters(fp32, distributed):
    if here().type == "cpu":
        pytest.skip("the case: a CPU has no launches to count")
    from megatron_npu.sim import counting

    launches = []
    for layers in (1, 4):
        model = make_ddp(layers, grad_reduce_in_fp32=fp32, use_distributed_optimizer=distributed)
        for step in _steps(model, distributed):
            with counting() as counts:
                step()
        launches.append(counts.total_launches)
    assert launches[0] == launches[1] > 0
