"""The exponential of large tensors, against fp64."""

from __future__ import annotations

import torch

from megatron_npu.ops.exponential import exponential_of_difference_


def test_of_a_difference(device):
    """Off by a rounding for each unit of both, as the numbers that are subtracted are themselves."""
    x, y = torch.linspace(-60, 40, 1001).repeat(3, 1), torch.tensor([[-30.0], [0.0], [20.0]])
    found = exponential_of_difference_(x.clone().to(device), y.to(device)).cpu().double()
    exact = (x.double() - y.double()).exp()
    limit = (x.double().abs() + y.double().abs() + 2) * 2**-23
    assert ((found - exact).abs() <= limit * exact).all()


def test_in_place_and_of_what_is_beyond():
    x = torch.tensor([[-torch.inf, 0.0]])
    assert exponential_of_difference_(x, torch.zeros(1, 1)).data_ptr() == x.data_ptr()
    assert abs(x - torch.tensor([[0.0, 1.0]])).max() < 1e-6
