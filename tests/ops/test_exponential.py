"""The exponential of large tensors, against fp64."""

from __future__ import annotations

import torch

from megatron_npu.ops.exponential import exponential_, exponential_of_difference_


def test_against_fp64(device):
    """Off by a rounding for each unit of the exponent, of what is lost in it anyway."""
    x = torch.cat([torch.linspace(-80, 40, 4001), torch.tensor([-torch.inf, 0.0])]).to(device)
    found = exponential_(x.clone()).cpu().double()
    exact = x.cpu().double().exp()
    limit = (x.cpu().double().abs().clamp(max=100) + 2) * 2**-23
    assert ((found - exact).abs() <= limit * exact).all()
    assert found[-2:].tolist() == [0.0, 1.0]


def test_in_place():
    x = torch.randn(7)
    assert exponential_(x).data_ptr() == x.data_ptr()


def test_of_a_difference(device):
    """Off by a rounding for each unit of both, as the numbers that are subtracted are themselves."""
    x, y = torch.linspace(-60, 40, 1001).repeat(3, 1), torch.tensor([[-30.0], [0.0], [20.0]])
    found = exponential_of_difference_(x.clone().to(device), y.to(device)).cpu().double()
    exact = (x.double() - y.double()).exp()
    limit = (x.double().abs() + y.double().abs() + 2) * 2**-23
    assert ((found - exact).abs() <= limit * exact).all()
