"""The uses of ``torch.cuda.current_device()`` that ``CpuDeviceIndex`` lists, each as Megatron writes it."""

from __future__ import annotations

import copy

import pytest
import torch

from megatron_npu import devices
from megatron_npu.base import settings
from megatron_npu.devices.cpu_device_index import CpuDeviceIndex
from megatron_npu.devices.redirect import Redirection

pytestmark = pytest.mark.skipif(settings.SIM.enabled(), reason="the case: an NPU has indices")


@pytest.fixture
def index():
    redirection = Redirection(devices.CpuDevice())
    redirection.on()
    torch.cuda.set_device(1)
    yield torch.cuda.current_device()
    redirection.off()


def test_every_spelling_of_a_tensor_on_the_device(index):
    assert type(index) is CpuDeviceIndex
    module = torch.nn.Linear(2, 2)
    made = (
        torch.empty(2, device=index),
        torch.empty(2).to(index),
        torch.empty(2).cuda(index),
        module.cuda(index).weight,
        module.to(index).weight,
    )
    assert {tensor.device for tensor in made} == {torch.device("cpu")}


def test_as_a_context_and_as_a_device(index):
    with torch.device(index):
        assert torch.empty(2).device.type == "cpu"
    assert torch.device(index) == torch.device("cuda", index) == torch.device("cpu")


def test_in_the_name_of_a_device(index):
    assert f"cuda:{index}" == "cuda:1"
    assert torch.empty(2, device=torch.device(f"cuda:{index}")).device.type == "cpu"


def test_as_an_index_of_the_generators(index):
    assert isinstance(torch.cuda.default_generators[index], torch.Generator)
    assert ["a", "b"][index] == {1: "b"}[index] == "b"


def test_as_a_number_that_is_compared_and_printed(index):
    assert int(index) == index == 1
    assert index != 2
    assert f"Rank 0, device {index}, " == f"Rank 0, device {index!s}, " == "Rank 0, device 1, "
    assert f"{index!r}" == "1"


def test_given_back_to_torch_cuda(index):
    torch.cuda.set_device(0)
    torch.cuda.set_device(index)
    assert torch.cuda.current_device() == index
    assert torch.cuda.get_device_name(index) == "cpu"


def test_as_a_device_id(index, tmp_path):
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dist.barrier(device_ids=[index])
        parallel = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(2, 2).cuda(index), device_ids=[index], output_device=index
        )
        assert parallel.device_ids is None
        del parallel  # before its group: see test_device_arguments.py
    finally:
        dist.destroy_process_group()


def test_kept_and_copied(index, tmp_path):
    assert copy.deepcopy({"device": index}) == {"device": 1}
    torch.save({"suspicious_device": index}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert loaded == {"suspicious_device": torch.device("cpu")}


def test_in_the_arithmetic_of_a_script(index):
    assert (index + 1, 3 + index, index - 1, 3 - index) == (2, 4, 0, 2)
    assert (index * 3, 3 * index, index % 2, 5 % index, index // 1, 5 // index) == (3, 3, 1, 0, 1, 5)
    assert (index < 2, index <= 1, index > 1, index >= 1) == (True, True, False, True)
