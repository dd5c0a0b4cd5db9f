"""FSDP and the offloaded optimizer on a device without CUDA: adapted, or refused before anything is lost."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.comparison import here

pytestmark = pytest.mark.usefixtures("single_process")
on_a_cpu = pytest.mark.skipif(
    "here().type != 'cpu'", reason="the case: elsewhere there is something to offload"
)


@on_a_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_offloaded_from_a_cpu_and_the_model_learns(dtype):
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    adam = torch.optim.AdamW
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 64, dtype=dtype))
    exact = torch.nn.Parameter(weight.detach().float())
    hybrid = HybridDeviceOptimizer(
        [weight],
        offload_fraction=1.0,
        cpu_optimizer_cls=adam,
        gpu_optimizer_cls=adam,
        param_update_in_fp32=True,
        lr=0.1,
    )
    plain = adam([exact], lr=0.1)
    for step in range(3):
        gradient = torch.linspace(-1, 1 + step, 64, dtype=dtype)
        weight.grad, exact.grad = gradient, gradient.float()
        hybrid.step()
        plain.step()
    assert torch.equal(weight, exact.to(dtype))
    assert torch.equal(hybrid.state[weight]["exp_avg"], plain.state[exact]["exp_avg"])


def test_the_mesh_of_torchs_fsdp_is_of_this_device():
    from megatron.core.distributed import torch_fully_sharded_data_parallel as fsdp

    assert fsdp.DeviceMesh.from_group(dist.group.WORLD, "cuda").device_type == here().type
