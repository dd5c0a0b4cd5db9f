"""The weight gradient that is added straight into its buffer."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.ops import dispatch
from megatron_npu.ops.products.weight_gradient import accumulate_weight_gradient


def one_product(device: str, dtype: torch.dtype) -> bool:
    """Return whether the device adds to an fp32 buffer without rounding the product to ``dtype``."""
    wider = device == "cuda" and hasattr(torch.ops.aten.addmm, "dtype_out")
    return dtype is torch.float32 or device == "npu" or wider


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_accumulates(device, dtype):
    x, grad = torch.randn(6, 2, 8, device=device).to(dtype), torch.randn(6, 2, 5, device=device).to(dtype)
    main_grad = torch.ones(5, 8, device=device)
    accumulate_weight_gradient(x, grad, main_grad)
    expected = 1 + torch.einsum("sbo,sbi->oi", grad.double(), x.double())
    limit = 1e-5 if one_product(device, dtype) else 5e-2
    torch.testing.assert_close(main_grad.double(), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_buffer_takes_the_sum(device, dtype):
    """Megatron with ``--accumulate-allreduce-grads-in-fp32`` off: the buffer has the dtype of the model."""
    x, grad = torch.randn(6, 8, device=device).to(dtype), torch.randn(6, 5, device=device).to(dtype)
    main_grad = torch.ones(5, 8, device=device, dtype=dtype)
    accumulate_weight_gradient(x, grad, main_grad)
    expected = 1 + grad.double().t() @ x.double()
    torch.testing.assert_close(main_grad.double(), expected, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("rows", "width", "reason"), [(4, 65536, "sizes below 65536"), (0, 8, "at least one row")]
)
def test_an_npu_says_what_it_cannot_add_at_once(device, rows, width, reason, monkeypatch):
    if device != "npu":
        pytest.skip("the case: a limit of the NPU's product")
    x = torch.ones(rows, 2, device=device, dtype=torch.bfloat16)
    grad = torch.ones(rows, width, device=device, dtype=torch.bfloat16)
    main_grad = torch.zeros(width, 2, device=device)
    monkeypatch.setattr(dispatch, "fallbacks", {})
    accumulate_weight_gradient(x, grad, main_grad)
    assert main_grad.eq(rows).all()
    assert [(name, reason in why) for name, why in dispatch.fallbacks] == [("weight_gradient", True)]
