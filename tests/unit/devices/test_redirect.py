"""The redirection of torch.cuda on a CPU: what it changes, for whom, and that it ends."""

from __future__ import annotations

import copy
import os
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, dataloader

from megatron_npu import devices
from megatron_npu.devices.redirect import Redirection, callers
from tests.support import processes


def as_megatron(source: str, name: str = "megatron.core.example") -> dict:
    """Run ``source`` in a module that belongs to Megatron and return its names."""
    module = types.ModuleType(name)
    module.torch = torch
    exec(source, vars(module))  # a test's own literal
    return vars(module)


OWNERS = [
    torch,
    torch.cuda,
    torch.cuda.random,
    torch.cuda.memory,
    torch.cuda.nvtx,
    torch.random,
    DeviceMesh,
    torch.Tensor,
    torch.nn.Module,
    torch.autocast,
    torch.amp.GradScaler,
    torch.amp.autocast_mode,
    dist,
    dist.distributed_c10d,
    DataLoader,
    dataloader._BaseDataLoaderIter,
    dataloader._SingleProcessDataLoaderIter,
    torch.utils._device.DeviceContext,
    torch.fft,
    torch.nested,
    torch.serialization,
    torch.UntypedStorage,
    torch.nn.parallel.DistributedDataParallel,
    torch.distributed.nn.functional._AlltoAll,
]


def test_off_restores_every_name():
    before = [dict(vars(owner)) for owner in OWNERS]
    redirection = Redirection(devices.CpuDevice())
    redirection.on()
    changed = sum(dict(vars(owner)) != old for owner, old in zip(OWNERS, before, strict=True))
    touched = {id(owner) for owner, _, _ in redirection._replaced._originals}
    redirection.off()
    assert changed == len(OWNERS)
    assert touched == set(map(id, OWNERS)), "the list above is not complete"
    for owner, old in zip(OWNERS, before, strict=True):
        assert dict(vars(owner)) == old, owner


def test_on_twice_is_once(redirection):
    first = torch.empty
    redirection.on()
    assert torch.empty is first


def test_off_twice_is_once():
    redirection = Redirection(devices.CpuDevice())
    redirection.on()
    redirection.off()
    before = dict(vars(torch))
    redirection.off()
    assert dict(vars(torch)) == before


def test_what_cannot_be_switched_on_is_off(monkeypatch):
    before = [dict(vars(owner)) for owner in OWNERS]
    redirection = Redirection(devices.CpuDevice())
    monkeypatch.delattr(dist, "barrier")
    with pytest.raises(AttributeError):
        redirection.on()
    monkeypatch.undo()
    for owner, old in zip(OWNERS, before, strict=True):
        assert dict(vars(owner)) == old, owner


def test_an_activation_that_failed_leaves_one_layer():
    """In a process of its own, which imports Megatron, is interrupted, and imports it again."""
    pytest.importorskip("megatron.core")
    code = """
import torch
before = torch.Tensor.to
from megatron_npu import plugin, standins
install, interruptions = standins.install, iter([KeyboardInterrupt()])
def interrupted_once(upstream):
    for interruption in interruptions:
        raise interruption
    install(upstream)
standins.install = interrupted_once
plugin.install()
try:
    import megatron.core
    raise SystemExit("the first import was not interrupted")
except KeyboardInterrupt:
    pass
import megatron.core
assert torch.Tensor.to is not before
plugin.uninstall()
assert torch.Tensor.to is before
"""
    environment = {**os.environ, "MEGATRON_NPU_DEVICE": "cpu"}
    processes.run([sys.executable, "-c", code], env=environment, check=True)


def test_cuda_device_is_left_alone():
    redirection = Redirection(devices.CudaDevice())
    before = dict(vars(torch.cuda))
    redirection.on()
    assert dict(vars(torch.cuda)) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(2, device="cuda"),
        lambda: torch.zeros(2, device="cuda:3"),
        lambda: torch.tensor([1.0], device=torch.device("cuda", 1)),
        lambda: torch.ones_like(torch.empty(2), device="cuda"),
        lambda: torch.empty(2).cuda(),
        lambda: torch.empty(2).cuda(0, non_blocking=True),
        lambda: torch.empty(2).to("cuda"),
        lambda: torch.empty(2).to(device="cuda", dtype=torch.float16),
        lambda: torch.empty(2).to(torch.cuda.current_device()),
        lambda: torch.empty(2, device=torch.cuda.current_device()),
        lambda: torch.empty(2, device=torch.device(f"cuda:{torch.cuda.current_device()}")),
        lambda: torch.empty(2, device=torch.device("cuda", torch.cuda.current_device())),
        lambda: torch.empty(2, device=3),
        lambda: torch.empty(2).to(0),
        lambda: torch.empty(2).new_zeros(3, device="cuda"),
        lambda: torch.empty(2).new_zeros(3, device=torch.cuda.current_device()),
        lambda: torch.Generator(device=torch.cuda.current_device()),
        lambda: torch.nn.Linear(2, 2).to(torch.cuda.current_device()).weight,
        lambda: torch.nn.Linear(2, 2, device=torch.cuda.current_device()).weight,
        lambda: torch.nn.Linear(2, 2).cuda().weight,
        lambda: torch.nn.Linear(2, 2).to("cuda").weight,
        lambda: torch.empty(2, pin_memory=True),
        lambda: torch.empty(2).pin_memory(),
        lambda: torch.cuda.FloatTensor([1.0]),
        lambda: torch.cuda.LongTensor(3),
    ],
)
def test_cuda_means_cpu(redirection, call):
    assert call().device.type == "cpu"


def test_memory_format_arrives(redirection):
    images = torch.empty(2, 3, 4, 5)
    assert images.cuda(memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)
    assert images.cuda().is_contiguous()


def test_a_module_is_moved_with_no_other_argument(redirection):
    """As on CUDA: ``Module.cuda`` has no ``non_blocking``."""
    with pytest.raises(TypeError):
        torch.nn.Linear(2, 2).cuda(0, True)


def test_other_devices_keep_their_meaning(redirection):
    assert torch.empty(2, device="meta").is_meta
    assert torch.empty(2).to("meta").is_meta
    assert torch.empty(2).to(torch.float16).dtype is torch.float16


@pytest.mark.parametrize(("named", "meant"), [("meta", "meta"), ("cuda", "cpu"), ("cuda:1", "cpu")])
def test_a_device_can_be_a_context(redirection, named, meant):
    with torch.device(named):
        made = [torch.empty(2), torch.randn(2), torch.nn.Linear(2, 2).weight]
    assert {tensor.device.type for tensor in made} == {meant}


def test_the_current_device_is_an_index(redirection):
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(3)
    third = torch.cuda.current_device()
    assert third == 3
    assert {3: "found"}[third] == "found"
    assert [0, 1, 2, "third"][third] == "third"
    assert int(third) == 3
    assert (third + 1, 1 + third, third % 2, 7 % third, third // 2, 9 - third, 2 * third) == (
        4,
        4,
        1,
        1,
        1,
        6,
        6,
    )
    assert third < 4 <= 4 - third + 4
    assert 2 < third <= 3
    assert not third > third
    assert f"cuda:{third}" == "cuda:" + str(third) == "cuda:3"
    torch.cuda.set_device("cuda:1")
    assert torch.cuda.current_device() == torch.cuda.current_device()
    assert torch.cuda.current_device() != third
    torch.cuda.set_device(torch.device("cuda"))
    assert not torch.cuda.current_device()


def test_the_current_device_is_kept_as_a_device(redirection, tmp_path):
    torch.cuda.set_device(2)
    now = torch.cuda.current_device()
    assert torch.empty(1, device=copy.deepcopy(now)).device.type == "cpu"
    torch.save({"device": now}, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == {"device": torch.device("cpu")}


@pytest.mark.parametrize("name", ["cuda", "cpu"])
def test_a_device_of_the_current_index_is_the_cpu(redirection, name):
    index = torch.cuda.current_device()
    for device in (torch.device(index), torch.device(name, index), torch.device(type=name, index=index)):
        assert device == torch.device("cpu")
    with torch.device(index):
        assert torch.empty(2).device.type == "cpu"


def test_a_mesh_of_cuda_devices_is_one_of_cpus(redirection, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        assert mesh.device_type == "cpu"
        linear = fully_shard(torch.nn.Linear(2, 2).to(torch.cuda.current_device()), mesh=mesh)
        assert linear(torch.ones(1, 2)).shape == (1, 2)
    finally:
        dist.destroy_process_group()


def test_tensor_types_are_types(redirection):
    assert isinstance(torch.cuda.HalfTensor, type)
    half = torch.empty(2, dtype=torch.float16)
    assert isinstance(half, torch.cuda.HalfTensor)
    assert not isinstance(half, torch.cuda.FloatTensor)
    assert isinstance(half, (torch.FloatTensor, torch.cuda.HalfTensor))


def test_type_strings_say_cuda_to_megatron_alone(redirection):
    tensor = torch.empty(2, dtype=torch.bfloat16)
    names = as_megatron("def kind(x): return x.type()")
    assert names["kind"](tensor) == "torch.cuda.BFloat16Tensor"
    assert tensor.type() == "torch.BFloat16Tensor"
    assert tensor.type("torch.cuda.FloatTensor").dtype is torch.float32
    assert tensor.type(torch.float64).dtype is torch.float64


def test_device_tensors_are_cuda_to_megatron_alone(redirection):
    tensor = torch.empty(2)
    asks = as_megatron("def asks(x): return x.is_cuda")["asks"]
    assert asks(tensor)
    assert asks(torch.nn.Parameter(tensor))
    assert not tensor.is_cuda
    assert not asks(tensor.to("meta"))


@pytest.mark.parametrize("module", ["optimizer.optimizer", "inference.sampling.torch_sampling"])
def test_what_wants_tensors_of_the_host_finds_them_there(redirection, module):
    module = f"megatron.core.{module}"
    assert not as_megatron("def asks(x): return x.is_cuda", module)["asks"](torch.empty(2))


@pytest.mark.parametrize(
    ("module", "probes"),
    [("torch", True), ("torch._inductor.utils", True), ("torchvision.ops", False), ("", False)],
)
def test_callers_are_whole_packages(module, probes):
    assert (module in callers.PROBE_HARDWARE) is probes


def test_torch_itself_still_sees_no_cuda(redirection):
    from torch._inductor.utils import get_gpu_type

    assert torch.cuda.device_count() >= 1
    assert not torch.cuda.is_available()
    assert get_gpu_type() == "cuda"  # inductor's default word for "none found"; it must not raise


def test_jit_script_still_knows_the_factories(redirection):
    @torch.jit.script
    def scripted(n: int) -> torch.Tensor:
        return torch.zeros(n) + torch.ones(n)

    assert scripted(3).tolist() == [1.0, 1.0, 1.0]


def test_what_comes_in_shared_memory_is_copied_to_the_device(redirection):
    """As ``mp.spawn`` hands a model to its processes: on CUDA each has a copy of its own."""
    model = torch.nn.BatchNorm1d(2)
    model.share_memory()
    shared = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in shared]
    addresses = [tensor.data_ptr() for tensor in shared]
    parameters = list(model.parameters())
    model.to("cpu")
    assert [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())] == addresses
    model.to(1)
    moved = [*model.parameters(), *model.buffers()]
    assert not {tensor.data_ptr() for tensor in moved} & {*addresses}
    assert all(map(torch.equal, moved, before))
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    tensor = torch.ones(2).share_memory_()
    for copy_of in (tensor.cuda(), tensor.to("cuda"), tensor.to(device=0)):
        assert copy_of.data_ptr() != tensor.data_ptr()
    own = torch.ones(2)
    assert own.cuda() is own


def test_float64_and_default_dtype_survive(redirection):
    assert torch.zeros(2, dtype=torch.float64, device="cuda").dtype is torch.float64
    assert torch.tensor(1.5, device="cuda", dtype=torch.double).dtype is torch.float64


def test_autocast_for_cuda_runs_on_the_cpu(redirection):
    linear = torch.nn.Linear(4, 4)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert linear(torch.randn(2, 4)).dtype is torch.bfloat16


def test_streams_and_events(redirection):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        torch.randn(200, 200) @ torch.randn(200, 200)
        end.record()
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0


def test_memory_statistics(redirection):
    devices.CpuDevice().release()  # what earlier tests have freed must not be used again
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    block = torch.ones(256 << 20, dtype=torch.uint8)  # much more than a kernel may take back meanwhile
    assert torch.cuda.memory_allocated() - before > 48 << 20
    del block
    torch.cuda.empty_cache()
    assert torch.cuda.max_memory_allocated() - before > 48 << 20
    statistics = torch.cuda.memory_stats()
    assert statistics["allocated_bytes.all.peak"] >= statistics["allocated_bytes.all.current"]
    assert statistics["num_alloc_retries"] == 0


def test_process_groups_asked_for_nccl_are_gloo(redirection, tmp_path):
    dist.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    try:
        assert dist.get_backend() == "gloo"
        group = dist.new_group([0], backend="nccl", pg_options=object())
        assert dist.get_backend(group) == "gloo"
        dist.barrier(group, device_ids=[0])
        for options in ((), (object(), False), (object(), True, "a group", torch.device("cuda", 0))):
            group = dist.new_group([0], None, "nccl", *options)
            assert dist.get_backend(group) == "gloo"
    finally:
        dist.destroy_process_group()


def test_device_generator_is_torchs_default(redirection):
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    assert torch.equal(torch.cuda.default_generators[0].get_state(), torch.cuda.random.get_rng_state("cuda"))


def test_host_generator_is_another(redirection):
    device = redirection.device
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    torch.rand(100)  # draws of the device
    with device.host_rng():
        assert torch.equal(torch.rand(3), expected)
        second = torch.rand(3)
    with device.host_rng():
        assert not torch.equal(torch.rand(3), second)  # the host's generator has moved on


def test_megatron_reads_the_host_generator(redirection):
    names = as_megatron("def state(): return torch.get_rng_state()\ndef put(s): torch.set_rng_state(s)")
    before = names["state"]()
    torch.rand(10)
    assert torch.equal(names["state"](), before), "a draw of the device must not move the host's generator"
    names["put"](before)
    default = torch.get_rng_state()
    torch.rand(10)
    assert not torch.equal(torch.get_rng_state(), default), "outside Megatron: the default generator"


@pytest.mark.parametrize("wrapped", [False, True])
def test_deepspeeds_accelerator_seeds_the_device_alone(redirection, monkeypatch, wrapped):
    """Also where torch._dynamo, imported after the redirection, has put its wrapper around ours."""
    if wrapped:
        monkeypatch.setattr(torch, "manual_seed", torch._disable_dynamo(torch.manual_seed))
    source = "def seed(value): torch.manual_seed(value)"
    names = as_megatron(source, "deepspeed.accelerator.cpu_accelerator")
    torch.manual_seed(4)
    first = torch.rand(3)
    torch.manual_seed(3)
    host = redirection.device.host_rng_state()
    names["seed"](4)
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(redirection.device.host_rng_state(), host)


@pytest.mark.parametrize("name", ["npu", "cuda"])
def test_an_absent_device_is_an_error(name):
    if {"npu": devices.NpuDevice, "cuda": devices.CudaDevice}[name]().absence() is None:
        pytest.skip(f"the case: {name} is here")
    code = "import megatron.core"
    result = processes.run(
        [sys.executable, "-c", f"import megatron_npu; {code}"],
        env={**os.environ, "MEGATRON_NPU_DEVICE": name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode
    last = result.stderr.strip().splitlines()[-1]
    assert f"MEGATRON_NPU_DEVICE={name} requires a machine with a usable {name} device, but " in last
    assert f"(usable here: {', '.join(devices.present())})" in last
    assert "Install the missing software" in last
