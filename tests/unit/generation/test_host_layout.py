"""Weights laid out for a processor: the same numbers in another order."""

from __future__ import annotations

import torch

from megatron_npu.generation.sampling.host_layout import lay_out_for_vectors


def test_matrices_stand_by_columns_and_nothing_else_changes():
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    half = torch.nn.Linear(6, 4).to(torch.bfloat16)
    before = {name: value.clone() for name, value in module.named_parameters()}
    input = torch.randn(2, 6)
    output = module(input)
    lay_out_for_vectors(module)
    lay_out_for_vectors(half)
    for name, value in module.named_parameters():
        assert torch.equal(value, before[name])
        assert value.t().is_contiguous()
    assert half.weight.is_contiguous(), "bf16 has kernels of its own"
    torch.testing.assert_close(module(input), output)
