"""How a tensor is moved (asynchronously, in which memory format) arrives: on a CPU and a simulated NPU."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.devices.redirect import Redirection
from tests.unit.devices.conftest import this_device


@pytest.fixture
def moves(monkeypatch):
    """The arguments of every ``Tensor.to`` that the redirection calls."""
    calls: list[tuple[tuple, dict]] = []
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *args, **kwargs: (calls.append((args, kwargs)), self)[1]
    )
    redirection = Redirection(this_device())
    redirection.on()
    yield calls, redirection.device
    redirection.off()


@pytest.mark.parametrize(
    ("move", "options"),
    [
        (lambda x: x.cuda(), {"non_blocking": False}),
        (lambda x: x.cuda(non_blocking=True), {"non_blocking": True}),
        (lambda x: x.cuda(0, True), {"non_blocking": True}),
        (lambda x: x.cuda("cuda", non_blocking=True), {"non_blocking": True}),
        (lambda x: x.cuda(device=0, non_blocking=True), {"non_blocking": True}),
        (lambda x: x.cuda(memory_format=torch.channels_last), {"memory_format": torch.channels_last}),
        (lambda x: x.to("cuda", non_blocking=True), {"non_blocking": True}),
        (lambda x: x.to(device="cuda:0", non_blocking=True, copy=True), {"non_blocking": True, "copy": True}),
        (lambda x: x.type(torch.cuda.HalfTensor, True), {"non_blocking": True, "dtype": torch.float16}),
        (lambda x: x.type(torch.cuda.HalfTensor, non_blocking=True), {"non_blocking": True}),
    ],
)
def test_how_a_tensor_is_moved_is_kept(moves, move, options):
    calls, device = moves
    move(torch.empty(2))
    ((places, given),) = calls
    assert torch.device(places[0] if places else given["device"]).type == device.name
    assert given.items() >= options.items()


class _WithListOfBuffers(torch.nn.Linear):
    """As Megatron's DistributedDataParallel: an attribute has the name of a method of torch's modules."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.buffers = []


@pytest.mark.parametrize(
    "move", [lambda m: m.cuda(), lambda m: m.to("cuda"), lambda m: m.to(device=torch.device("cuda"))]
)
def test_a_module_whose_attributes_hide_torchs_methods_is_moved(move):
    redirection = Redirection(this_device())
    redirection.on()
    try:
        module = _WithListOfBuffers()
        module.mean = module.mean.cpu().share_memory_()
        assert move(module) is module
        assert {each.device.type for each in (module.weight, module.mean)} == {redirection.device.name}
        assert not (module.mean.device.type == "cpu" and module.mean.is_shared())
    finally:
        redirection.off()
