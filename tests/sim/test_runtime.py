"""Streams, events, memory, devices and counters of the simulated runtime, through torch.npu."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

pytestmark = pytest.mark.simulated
MEBIBYTE = 1 << 20


@pytest.fixture
def on_device_0():
    torch.npu.set_device(0)
    yield
    torch.npu.set_device(0)


class TestDevices:
    def test_tensors_and_results_live_on_their_device(self, on_device_0):
        assert torch.npu.device_count() == 8
        x = torch.arange(6.0, device="npu").view(2, 3)
        assert x.device == torch.device("npu", 0)
        assert (x @ x.T).cpu().tolist() == [[5.0, 14.0], [14.0, 50.0]]

    def test_a_context_chooses_the_device_and_restores_it(self, on_device_0):
        with torch.npu.device(3):
            assert torch.npu.current_device() == 3
            assert torch.ones(2, device="npu").device.index == 3
        assert torch.npu.current_device() == 0

    def test_results_follow_the_arguments_not_the_current_device(self, on_device_0):
        x = torch.ones(4, device="npu:2")
        for result in (x + 1, x.sum(), torch.zeros_like(x), x.nonzero(), torch.stack([x, x])):
            assert result.device.index == 2

    def test_copies_between_devices(self, on_device_0):
        x = torch.arange(5.0, device="npu:1")
        y = x.to("npu:0")
        assert y.device.index == 0
        assert torch.equal(y.cpu(), x.cpu())

    @pytest.mark.parametrize(
        ("first", "second"), [("npu:0", "cpu"), ("cpu", "npu:0"), ("npu:0", "npu:1")], ids=str
    )
    def test_mixing_devices_is_an_error(self, first, second):
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(3, device=first) + torch.ones(3, device=second)

    def test_mixing_devices_is_an_error_in_matmul_cat_and_in_place(self):
        x, y = torch.ones(2, 2, device="npu"), torch.ones(2, 2)
        for mix in (
            lambda: x @ y,
            lambda: torch.cat([x, y]),
            lambda: x.add_(y),
            lambda: torch.mm(x, x, out=y),
        ):
            with pytest.raises(RuntimeError, match="device"):
                mix()

    def test_host_scalars_and_host_indices_are_allowed(self):
        x = torch.arange(6.0, device="npu")
        assert (x * torch.tensor(2.0)).sum().item() == 30
        assert x[torch.tensor([1, 5])].tolist() == [1.0, 5.0]

    def test_a_like_function_may_ask_for_the_host(self):
        assert torch.ones_like(torch.zeros(2, device="npu"), device="cpu").device.type == "cpu"

    def test_no_such_device(self):
        with pytest.raises(RuntimeError):
            torch.ones(1, device="npu:8")

    def test_the_chip_is_the_one_asked_for(self):
        assert torch.npu.get_device_name(0) == "Ascend910B2"


class TestStreamsAndEvents:
    def test_work_on_another_stream_is_there_after_waiting(self):
        stream = torch.npu.Stream()
        x = torch.ones(1000, device="npu")
        with torch.npu.stream(stream):
            assert torch.npu.current_stream() == stream
            y = x * 3
        torch.npu.current_stream().wait_stream(stream)
        y.record_stream(torch.npu.current_stream())
        assert y.sum().item() == 3000
        assert stream.query()

    def test_streams_belong_to_devices(self):
        with torch.npu.device(1):
            assert torch.npu.Stream().device.index == 1

    def test_events_take_time(self):
        start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
        start.record()
        time.sleep(0.02)
        end.record()
        end.synchronize()
        assert end.query()
        # Only a lower bound: a loaded machine may take any time.
        assert start.elapsed_time(end) >= 15

    def test_an_event_may_be_recorded_again(self):
        event = torch.npu.Event()
        for _ in range(3):
            event.record()
            event.synchronize()
            assert event.query()

    def test_events_order_streams(self):
        first, second = torch.npu.Stream(), torch.npu.Stream()
        event = torch.npu.Event()
        with torch.npu.stream(first):
            x = torch.full((10,), 2.0, device="npu")
            event.record(first)
        second.wait_event(event)
        with torch.npu.stream(second):
            y = x + 1
        second.synchronize()
        assert y.sum().item() == 30

    def test_pinned_memory_copies_without_blocking(self):
        x = torch.arange(64.0).pin_memory()
        assert x.is_pinned()
        y = x.to("npu", non_blocking=True)
        torch.npu.synchronize()
        assert torch.equal(y.cpu(), x)


class TestMemory:
    def test_statistics_follow_tensors(self):
        torch.npu.empty_cache()
        before = torch.npu.memory_allocated()
        x = torch.empty(MEBIBYTE, dtype=torch.float32, device="npu")
        assert 4 * MEBIBYTE <= torch.npu.memory_allocated() - before < 5 * MEBIBYTE
        torch.npu.reset_peak_memory_stats()
        y = x + 1
        del y
        assert torch.npu.max_memory_allocated() - before >= 8 * MEBIBYTE
        del x
        assert torch.npu.memory_allocated() == before

    def test_devices_have_memory_of_their_own(self):
        before = torch.npu.memory_allocated(4)
        x = torch.empty(MEBIBYTE, device="npu:5")
        assert torch.npu.memory_allocated(4) == before
        assert torch.npu.memory_allocated(5) >= x.numel() * 4

    def test_too_much_is_torchs_out_of_memory_error(self):
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(1 << 40, device="npu")
        assert torch.ones(2, device="npu").sum().item() == 2

    def test_a_freed_tensor_gives_its_memory_back(self):
        free, total = torch.npu.mem_get_info()
        x = torch.empty(64 * MEBIBYTE, dtype=torch.uint8, device="npu")
        assert torch.npu.mem_get_info()[0] <= free - 64 * MEBIBYTE
        del x
        torch.npu.empty_cache()
        assert torch.npu.mem_get_info() == (torch.npu.mem_get_info()[0], total)
        assert torch.npu.mem_get_info()[0] >= free


class TestHostMemoryOfADevice:
    """Page-locked host memory that kernels of the device read and write (aclrtHostRegister)."""

    @pytest.fixture
    def runtime(self, on_device_0):
        from megatron_npu.sim import build

        torch.npu.init()
        return ctypes.CDLL(str(build.runtime() / build.RUNTIME_LIBRARY))

    def test_a_tensor_of_it_computes_and_is_counted_apart(self, on_device_0):
        import torch_npu

        from megatron_npu.sim import counting
        from megatron_npu.sim.counters import Work

        with counting() as counts:
            x = torch_npu.empty_with_swapped_memory([1024, 4], dtype=torch.float32, device="npu:0")
            x.fill_(2)
            y = torch.ones(1024, 4, device="npu")
            y.copy_(x)
            assert x.cpu().sum().item() == 8192
        assert 4 * 4096 <= counts.peak <= 4 * 4096 + 512  # of y alone
        assert counts.registered == 4 * 4096
        assert counts.swapped == Work(3, 3 * 4 * 4096)
        with pytest.raises(RuntimeError, match=r"aten::add_\.Tensor: given a tensor of torch_npu\.empty"):
            x.add_(1)
        del x
        with counting() as counts:
            torch.npu.synchronize()
        assert counts.registered == 0

    def test_memory_without_the_attribute_has_another_address_that_is_not_copied(self, runtime):
        host, device = ctypes.c_void_p(), ctypes.c_void_p()
        size, kind = ctypes.c_uint64(8192), 0
        assert runtime.aclrtMallocHost(ctypes.byref(host), size) == 0
        assert runtime.aclrtHostRegister(host, size, 1, ctypes.byref(device)) != 0  # no such type
        assert (
            runtime.aclrtHostRegister(ctypes.c_void_p(host.value + 64), size, kind, ctypes.byref(device)) != 0
        )
        assert runtime.aclrtHostRegister(host, size, kind, ctypes.byref(device)) == 0
        assert runtime.aclrtHostRegister(host, size, kind, ctypes.byref(device)) != 0  # once is enough
        assert device.value != host.value
        ctypes.memset(device.value, 7, 8192)  # as a kernel does
        assert ctypes.string_at(host.value, 8192) == b"\7" * 8192
        assert runtime.aclrtMemcpy(host, size, device, size, 2) != 0
        assert runtime.aclrtMemset(device, size, 0, size) != 0
        assert runtime.aclrtMemset(host, size, 0, size) == 0
        assert runtime.aclrtHostUnregister(host) == 0
        assert runtime.aclrtHostUnregister(host) != 0
        assert runtime.aclrtFreeHost(host) == 0

    def test_memory_of_others_is_refused(self, runtime):
        own, device = ctypes.create_string_buffer(3 * 4096), ctypes.c_void_p()
        start = ctypes.c_void_p(-(-ctypes.addressof(own) // 4096) * 4096)
        assert runtime.aclrtHostRegister(start, ctypes.c_uint64(4096), 0, ctypes.byref(device)) != 0


class TestCounting:
    def test_launches_transfers_and_memory(self):
        from megatron_npu.sim import counting
        from megatron_npu.sim.counters import Work

        x = torch.ones(256, 256, device="npu")
        with counting() as counts:
            y = torch.mm(x, x)
            y.add_(1)
            y.view(-1).unsqueeze(0).t()  # views launch nothing
            y.cpu()
            y[0, 0].item()
        assert counts.launches == {"aten::mm": Work(1, 256 * 256 * 4), "aten::add_.Tensor": Work(1, 0)}
        assert counts.transfers == Work(2, 256 * 256 * 4)
        assert counts.total_launches == 2
        assert counts.peak == counts.allocated
        assert 256 * 256 * 4 <= counts.peak <= 256 * 256 * 4 + 512  # blocks are multiples of 512 bytes
        assert counts.communication == {}
        assert counts.without_body == {}

    def test_counting_nests(self):
        from megatron_npu.sim import counting

        x = torch.ones(4, device="npu")
        with counting() as outer:
            x + 1
            with counting() as inner:
                x + 1
        assert (outer.total_launches, inner.total_launches) == (2, 1)

    def test_functions_without_a_body_are_named_and_do_not_pretend_to_compute(self):
        from megatron_npu.sim import build, counting

        runtime = ctypes.CDLL(str(build.runtime() / build.RUNTIME_LIBRARY))
        with counting() as counts:
            assert runtime.aclmdlFinalizeDump() == 0
            assert runtime.aclopCompileAndExecute() != 0
        assert counts.without_body == {"aclmdlFinalizeDump": 1, "aclopCompileAndExecute": 1}

    def test_an_operation_that_calls_a_kernel_past_the_dispatcher_fails_loudly(self):
        x = torch.ones(2, 3, device="npu")
        with pytest.raises(RuntimeError, match="aclopCompileAndExecute computes nothing here"):
            torch.batch_norm_stats(x, 1e-5)  # torch's CPU has none either


def test_building_does_not_mistake_the_simulator_for_a_real_cann():
    from megatron_npu.sim import build

    assert build.present("libascendcl.so")  # in this process: the simulated one
    assert build._absent({"libascendcl.so"}, {"aclInit"}) == ({"libascendcl.so"}, {"aclInit"})
