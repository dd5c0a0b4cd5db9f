"""Autocast, as a script for CUDA writes it: on the CPU, and by tests/sim on the simulated NPU."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("redirection")


def linear_function(custom_fwd, custom_bwd) -> type[torch.autograd.Function]:
    """Return a linear layer of its own gradient, decorated as megatron.core.tensor_parallel.layers does."""

    class Linear(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x.matmul(weight.t())

        @staticmethod
        @custom_bwd
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient.matmul(weight), gradient.t().matmul(x)

    return Linear


DECORATORS = {
    "torch.amp": lambda: (torch.amp.custom_fwd(device_type="cuda"), torch.amp.custom_bwd(device_type="cuda")),
    "torch.cuda.amp": lambda: (torch.cuda.amp.custom_fwd, torch.cuda.amp.custom_bwd),
}
# Decorated when this file is imported: before the redirection.
EARLY = {spelling: linear_function(*decorators()) for spelling, decorators in DECORATORS.items()}


@pytest.mark.parametrize("early", [True, False], ids=["decorated-before", "decorated-after"])
@pytest.mark.parametrize("spelling", DECORATORS)
def test_an_own_gradient_runs_in_the_dtype_of_its_forward(spelling, early):
    function = EARLY[spelling] if early else linear_function(*DECORATORS[spelling]())
    x, weight = (torch.randn(size, 4, device="cuda", requires_grad=True) for size in (3, 5))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = function.apply(x, weight)
    assert y.dtype is torch.bfloat16
    y.float().square().sum().backward()
    got = x.grad, weight.grad
    x.grad = weight.grad = None
    x.matmul(weight.t()).square().sum().backward()
    for gradient, true in zip(got, (x.grad, weight.grad), strict=True):
        assert (gradient - true).norm() < 2e-2 * true.norm()


def test_an_own_gradient_can_ask_for_its_dtype():
    seen = []

    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        seen.append((x.dtype, torch.is_autocast_enabled()))

    class Context:
        pass

    half = torch.ones(2, dtype=torch.bfloat16, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        forward(Context(), half)
    forward(Context(), half)
    assert seen == [(torch.float32, False), (torch.bfloat16, False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_answers_for_the_device(redirection, dtype):
    name = redirection.device.name
    assert not torch.is_autocast_enabled()
    with torch.autocast("cuda", dtype=dtype):
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled(name)
        assert torch.get_autocast_dtype("cuda") is torch.get_autocast_dtype(name) is dtype
        assert torch.get_autocast_gpu_dtype() is dtype
        with torch.autocast(device_type="cuda", enabled=False):
            assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cuda")


def test_the_state_is_that_of_the_device(redirection):
    name = redirection.device.name
    before = torch.get_autocast_dtype(name)
    try:
        for arguments in ((True,), ("cuda", True)):
            torch.set_autocast_enabled(*arguments)
            assert torch.is_autocast_enabled(name)
            torch.set_autocast_enabled(enabled=False)
            assert not torch.is_autocast_enabled(name)
        torch.set_autocast_gpu_dtype(torch.float16)
        assert torch.get_autocast_dtype(name) is torch.float16
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        assert torch.get_autocast_dtype(name) is torch.bfloat16
    finally:
        torch.set_autocast_enabled(name, False)
        torch.set_autocast_dtype(name, before)


def test_other_devices_are_left_alone():
    with torch.autocast("xpu", dtype=torch.bfloat16, enabled=False):
        assert not torch.is_autocast_enabled()
    with pytest.raises(RuntimeError):
        torch.is_autocast_enabled("no such device")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.amp.GradScaler("cuda"),
        lambda: torch.amp.GradScaler(),
        lambda: torch.cuda.amp.GradScaler(),
    ],
)
def test_a_scaler_scales_and_skips_what_overflows(make):
    scaler, weight = make(), torch.nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    assert scaler.is_enabled()
    loss = weight.sum()
    assert scaler.scale(loss).item() == 2.0 * scaler.get_scale()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]
    scale = scaler.get_scale()
    weight.grad = torch.tensor([1.0, float("inf")], device="cuda")
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]
    assert scaler.get_scale() == scale / 2
