"""The many ways in which a script says "on cuda": on the CPU, and by tests/sim on the simulated NPU."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.usefixtures("redirection")

# Of all operators with a ``device`` these are no factories for users, by their name or by what they do.
NO_FACTORIES = {"Generator", "empty_quantized"}


def test_every_factory_of_torch_knows_cuda(redirection):
    """Compare with the schemas of torch's operators, so that a factory of a later torch is not missed."""
    named = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        and any(argument.name == "device" for argument in schema.arguments)
    }
    public = {name for name in named if not name.startswith("_") and callable(getattr(torch, name, None))}
    redirected = {name for owner, name, _ in redirection._replaced._originals if owner is torch}
    assert len(public) > 20
    assert public - redirected <= NO_FACTORIES


MADE = {
    "windows": lambda: torch.hann_window(4, device="cuda"),
    "empty_permuted": lambda: torch.empty_permuted((2, 3), (0, 1), device="cuda"),
    "fftfreq": lambda: torch.fft.fftfreq(4, device="cuda"),
    "signal": lambda: torch.signal.windows.hann(4, device="cuda"),
    "generator": lambda: torch.Generator(device="cuda"),
    "generator by position": lambda: torch.Generator("cuda:0"),
    "storage": lambda: torch.ones(2).untyped_storage().cuda(),
    "typed storage": lambda: torch.ones(2).storage().cuda(0),
    "type": lambda: torch.ones(2).type(torch.cuda.HalfTensor),
    "name of a type": lambda: torch.ones(2).type("torch.cuda.HalfTensor"),
    "module": lambda: torch.nn.Linear(2, 2).cuda(0).weight,
    "module to": lambda: torch.nn.Linear(2, 2).to("cuda").weight,
    "empty module": lambda: torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_cuda_is_the_device(redirection, make):
    assert make().device.type == redirection.device.name


def test_a_sparse_tensor(redirection):
    if redirection.device.name == "npu":
        pytest.skip("the case: the simulated NPU has no sparse tensors")
    assert torch.sparse_coo_tensor([[0]], [1.0], (2,), device="cuda").to_dense().tolist() == [1.0, 0.0]


def test_types_change_the_dtype():
    assert torch.ones(2).type(torch.cuda.HalfTensor).dtype is torch.float16


@pytest.mark.parametrize(
    "location",
    [
        "cuda",
        "cuda:0",
        torch.device("cuda"),
        torch.device("cuda:0"),
        {"cpu": "cuda:0"},
        lambda storage, location: storage.cuda(0),
    ],
    ids=["name", "name and index", "device", "device and index", "table", "function"],
)
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_checkpoint_is_loaded_to_cuda(redirection, location, weights_only):
    file = io.BytesIO()
    torch.save({"a": torch.tensor([1.0, 2.0])}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=location, weights_only=weights_only)["a"]
    assert loaded.device.type == redirection.device.name
    assert loaded.tolist() == [1.0, 2.0]


def test_generators_are_torchs_own(redirection):
    generator = torch.Generator("cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    first = torch.rand(3, device="cuda", generator=generator)
    assert torch.equal(torch.rand(3, device="cuda", generator=generator.manual_seed(3)), first)


@pytest.mark.parametrize(
    "name", ["torch.cuda.DoubleTensor", "torch.cuda.HalfTensor", "torch.cuda.FloatTensor"]
)
@pytest.mark.parametrize("by_name", [True, False])
def test_the_default_type(redirection, name, by_name):
    if redirection.device.name == "npu" and "Double" in name:
        pytest.skip("the case: an NPU has no float64")
    last = name.rpartition(".")[-1]
    try:
        torch.set_default_tensor_type(name if by_name else getattr(torch.cuda, last))
        assert isinstance(torch.tensor([1.0]).cuda(), getattr(torch.cuda, last))
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)


def test_the_default_device(redirection):
    try:
        torch.set_default_device("cuda")
        assert torch.ones(2).device.type == redirection.device.name
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "options", [{"device_ids": [0]}, {"device_ids": [0], "output_device": 0}, {}], ids=str
)
def test_torchs_data_parallel_modules(redirection, tmp_path, options):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert _gradient_under_ddp(options) == [[1.0, 1.0], [1.0, 1.0]]
    finally:
        dist.destroy_process_group()


def _gradient_under_ddp(options):
    """In a function of its own, so that the module is gone before the group.

    Where the module goes last, it takes the group with it and waits for gloo's thread with the GIL held,
    which that thread may be asking for (torch 2.13, without any redirection, too): both wait for ever.
    """
    parallel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), **options)
    parallel(torch.ones(1, 2).cuda()).sum().backward()
    return parallel.module.weight.grad.tolist()
