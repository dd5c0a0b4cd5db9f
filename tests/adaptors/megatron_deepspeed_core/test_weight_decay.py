"""Which weights do without decay, where DeepSpeed keeps a part of each."""

from __future__ import annotations

import torch
from torch import nn

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.optimizer import (
    does_without_decay,
    group_by_whole_shapes,
)


def in_parts(module: nn.Module) -> nn.Module:
    """Return the module as stage 3 of ZeRO leaves it: nothing in its parameters, their shapes beside them."""
    for parameter in module.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    return module


def test_parts_are_told_apart_as_the_whole_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    whole = [does_without_decay(*named) for named in model.named_parameters()]
    assert whole == [False, True, True, True]
    assert [does_without_decay(*named) for named in in_parts(model).named_parameters()] == whole


def test_what_the_caller_says_counts():
    asked = []

    def upstreams(modules, condition, *scales):
        asked.append((condition, scales))
        return []

    def own(name, parameter):
        return True

    group_by_whole_shapes(upstreams, [], own, None, 1.0)
    group_by_whole_shapes(upstreams, [], None, None, 1.0)
    assert asked == [(own, (None, 1.0)), (does_without_decay, (None, 1.0))]
