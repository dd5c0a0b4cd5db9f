"""The plug-in's npu device and what ``torch.cuda`` means on it, on a simulated NPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_npu.devices.npu import NpuDevice
from megatron_npu.devices.redirect import Redirection

pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def device() -> NpuDevice:
    return NpuDevice()


@pytest.fixture
def redirected(device):
    redirection = Redirection(device)
    redirection.on()
    yield
    redirection.off()


class TestDevice:
    def test_it_is_there(self, device):
        assert device.absence() is None
        assert device.count() == 8
        assert device.torch_device() == torch.device("npu", 0)

    def test_it_is_the_one_selected_where_it_is(self):
        from megatron_npu import devices

        assert devices.current().name == "npu"
        assert devices.current().backend == "hccl"

    def test_current_device(self, device):
        device.set_current(2)
        assert device.torch_device().index == 2
        device.set_current(0)

    def test_random_state(self, device):
        device.manual_seed(4)
        state = device.rng_state()
        first = torch.rand(8, device="npu")
        device.set_rng_state(state)
        assert torch.equal(torch.rand(8, device="npu"), first)

    def test_memory(self, device):
        device.synchronize()
        before = device.memory().allocated
        device.reset_peak_memory()
        x = torch.ones(1 << 20, device="npu")
        del x
        memory = device.memory()
        assert memory.allocated == before
        assert memory.peak >= before + (4 << 20)
        assert memory.reserved >= memory.allocated
        assert device.utilization() is None  # a processor that pretends to be an NPU is no measurement


@pytest.mark.usefixtures("redirected")
class TestTorchCuda:
    def test_tensors_go_to_the_npu(self):
        assert torch.cuda.is_available()
        for x in (
            torch.ones(2, device="cuda"),
            torch.ones(2).cuda(),
            torch.ones(2).to("cuda:0"),
            torch.ones(2).to(torch.device("cuda")),
            torch.nn.Linear(2, 2).cuda().weight,
            torch.empty(2, device=torch.cuda.current_device()),
        ):
            assert x.device == torch.device("npu", 0)

    def test_tensor_types_are_those_of_the_npu(self):
        x = torch.ones(2, device="cuda", dtype=torch.bfloat16)
        assert isinstance(x, torch.cuda.BFloat16Tensor)
        assert not isinstance(x.cpu(), torch.cuda.BFloat16Tensor)
        assert torch.cuda.FloatTensor([1.0]).device.type == "npu"

    def test_streams_of_devices_with_cuda_names(self):
        for device in (torch.device("cuda:1"), torch.device("npu", 1), 1):
            stream = torch.cuda.Stream(device)
            assert stream.device == torch.device("npu", 1)
            assert isinstance(stream, torch.cuda.Stream)
        assert torch.cuda.Stream(device=torch.device("cuda"), priority=-1).device == torch.device("npu", 0)
        assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
        assert not isinstance(torch.cuda.Event(), torch.cuda.Stream)

    def test_streams_events_and_properties(self):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.Stream()
        start.record()
        with torch.cuda.stream(stream):
            y = torch.ones(4, device="cuda") * 2
        torch.cuda.current_stream().wait_stream(stream)
        end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) >= 0
        assert y.sum().item() == 8
        assert torch.cuda.device_count() == 8
        assert torch.cuda.get_device_properties("cuda").total_memory == 64 << 30
        assert torch.cuda.get_device_capability() >= (8, 0)
        # megatron.training.arguments compares it with a number
        assert torch.cuda.get_device_properties(0).major == torch.cuda.get_device_capability()[0]
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total == 64 << 30

    def test_random_state_by_cuda_names(self):
        torch.cuda.manual_seed(9)
        state = torch.cuda.get_rng_state()
        first = torch.rand(4, device="cuda")
        torch.cuda.set_rng_state(state, device="cuda:0")
        assert torch.equal(torch.rand(4, device="cuda"), first)

    def test_autocast(self):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).dtype == torch.bfloat16

    def test_parts_with_gaps_are_reduced_and_scattered(self, tmp_path):
        """Columns of a matrix, which NCCL takes: Megatron's context parallelism of images hands them over."""
        store = f"file://{tmp_path / 'store'}"
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
        try:
            columns = torch.arange(12.0, device="npu").view(3, 4)[:, 2:]
            mine = torch.empty(3, 2, device="npu")
            dist.reduce_scatter(mine, [columns])
            assert mine.cpu().equal(columns.cpu())
            work = dist.reduce_scatter(output=mine, input_list=[columns + 1], async_op=True)
            work.wait()
            assert mine.cpu().equal(columns.cpu() + 1)
        finally:
            dist.destroy_process_group()
