"""The weight gradient that is added straight into its buffer."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.ops.weight_gradient import accumulate_weight_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_accumulates(device, dtype):
    x, grad = torch.randn(6, 2, 8, device=device).to(dtype), torch.randn(6, 2, 5, device=device).to(dtype)
    main_grad = torch.ones(5, 8, device=device)
    accumulate_weight_gradient(x, grad, main_grad)
    expected = 1 + torch.einsum("sbo,sbi->oi", grad.double(), x.double())
    limit = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(main_grad.double(), expected, rtol=0, atol=limit)
