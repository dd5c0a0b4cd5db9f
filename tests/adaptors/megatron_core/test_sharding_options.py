"""FSDP and the offloaded optimizer on a device without CUDA: adapted, or refused before anything is lost."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_npu.errors import UsageError
from tests.adaptors.comparison import here

pytestmark = pytest.mark.usefixtures("single_process")
on_a_cpu = pytest.mark.skipif("here().type != 'cpu'", reason="refused on a cpu only")


@on_a_cpu
def test_nothing_is_offloaded_from_a_cpu():
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    with pytest.raises(UsageError, match="--optimizer-cpu-offload on the cpu"):
        HybridDeviceOptimizer([torch.nn.Parameter(torch.ones(2))])


def test_the_mesh_of_torchs_fsdp_is_of_this_device():
    from megatron.core.distributed import torch_fully_sharded_data_parallel as fsdp

    assert fsdp.DeviceMesh.from_group(dist.group.WORLD, "cuda").device_type == here().type
