"""FSDP and the offloaded optimizer on a device without CUDA: adapted, or refused before anything is lost."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.distributed as dist

from megatron_npu.adaptors.megatron_core import arguments
from megatron_npu.errors import UsageError
from tests.adaptors.comparison import here

pytestmark = pytest.mark.usefixtures("single_process")
on_a_cpu = pytest.mark.skipif("here().type != 'cpu'", reason="refused on a cpu only")


def checks(*names: str) -> tuple[arguments.Check, ...]:
    """The checks of these names alone: the others want more arguments."""
    return tuple(check for check in arguments.CHECKS if check.name in names)


@on_a_cpu
def test_nothing_is_offloaded_from_a_cpu():
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    with pytest.raises(UsageError, match="--optimizer-cpu-offload on the cpu"):
        HybridDeviceOptimizer([torch.nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(("flags", "refused"), [({}, True), ({"bf16": True}, False), ({"fp16": True}, False)])
def test_fp32_parameters_are_not_offloaded(flags, refused, monkeypatch):
    """Upstream's optimizer of views would end in a ValueError, after the model has been built."""
    given = {"optimizer_cpu_offload": True, "bf16": False, "fp16": False, **flags}
    args = argparse.Namespace(**given)
    monkeypatch.setattr(arguments, "CHECKS", checks("refuse_offload_in_fp32"))
    if refused:
        with pytest.raises(UsageError, match="--optimizer-cpu-offload with fp32 parameters; expected --bf16"):
            arguments.validate_args(lambda args: args, args)
    else:
        assert arguments.validate_args(lambda args: args, args) is args
    args.optimizer_cpu_offload = False
    assert arguments.validate_args(lambda args: args, args) is args


def test_the_mesh_of_torchs_fsdp_is_of_this_device():
    from megatron.core.distributed import torch_fully_sharded_data_parallel as fsdp

    assert fsdp.DeviceMesh.from_group(dist.group.WORLD, "cuda").device_type == here().type


def test_streams_of_high_priority_are_nccls():
    from megatron.core import parallel_state

    assert parallel_state.get_nccl_options("dp_cp", {"dp_cp": {"is_high_priority_stream": True}}) is None
