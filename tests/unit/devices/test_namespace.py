"""Every redirected name of torch.cuda takes what torch declares: on the CPU, and by tests/sim on the NPU."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import pytest
import torch

from megatron_npu import devices
from megatron_npu.base import settings
from megatron_npu.devices.redirect import Redirection

DEVICE = devices.NpuDevice() if settings.SIM.enabled() else devices.CpuDevice()


def stock(path: str) -> Any:
    return functools.reduce(getattr, path.split("."), torch.cuda)


def signatures() -> dict[str, inspect.Signature]:
    """Return the signatures of the stock functions and classes that the redirection replaces."""
    found = {}
    for path in DEVICE.cuda_namespace():
        with contextlib.suppress(TypeError, ValueError, AttributeError):  # tensor types and data have none
            found[path] = inspect.signature(stock(path))
    return found


SIGNATURES = signatures()
# What the parameters of torch.cuda's functions are given.
VALUES = {
    "device": lambda: 0,
    "seed": lambda: 3,
    "new_state": lambda: torch.cuda.get_rng_state(),
    "new_states": lambda: torch.cuda.get_rng_state_all(),
    "stream": lambda: torch.cuda.current_stream(),
    "stream_ptr": lambda: 0,
    "callable": lambda: lambda: None,
    "msg": lambda: "a range",
    "res": lambda: 0,
    "priority": lambda: 0,
    "enable_timing": lambda: True,
    "blocking": lambda: False,
    "interprocess": lambda: False,
    "external": lambda: False,
    "abbreviated": lambda: True,
}
NO_NAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Where torch_npu 2.13 has fewer parameters than torch.
UNCALLED = {
    "ExternalStream",
    "memory._record_memory_history",
    "memory._snapshot",
    "memory._C._cuda_attach_out_of_memory_observer",
}


def test_the_list_is_not_empty():
    assert len(SIGNATURES) > 40


@pytest.mark.parametrize(
    "path", sorted(SIGNATURES.keys() - UNCALLED if settings.SIM.enabled() else SIGNATURES)
)
def test_it_takes_what_torch_declares(redirection, path):
    parameters = [p for p in SIGNATURES[path].parameters.values() if p.kind not in NO_NAMED]
    values = {parameter.name: VALUES[parameter.name]() for parameter in parameters}
    function = stock(path)
    function(*values.values())
    function(**values)
    function(**{p.name: values[p.name] for p in parameters if p.default is inspect.Parameter.empty})


def test_the_device_can_be_named_in_every_way(redirection):
    for device in (None, 0, "cuda", "cuda:0", torch.device("cuda"), torch.device("cuda:0")):
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "memory_stats",
            "memory_summary",
            "synchronize",
        ):
            getattr(torch.cuda, name)(device=device)


@pytest.mark.parametrize("module", ["cuda", "cuda.random"])
def test_the_state_of_every_device_comes_back(redirection, module):
    random = functools.reduce(getattr, module.split("."), torch)
    torch.rand(1, device="cuda")
    states = random.get_rng_state_all()
    assert len(states) == torch.cuda.device_count()
    drawn = torch.rand(3, device="cuda")
    random.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)


@pytest.mark.parametrize("module", ["cuda", "cuda.random"])
def test_seeds(redirection, module):
    random = functools.reduce(getattr, module.split("."), torch)
    drawn = []
    for seed in (lambda: random.manual_seed(4), lambda: random.manual_seed_all(4)):
        seed()
        assert random.initial_seed() == 4
        drawn.append(torch.rand(3, device="cuda"))
    assert torch.equal(*drawn)
    for seed in (random.seed, random.seed_all):
        seed()
        assert random.initial_seed() != 4
        assert not torch.equal(torch.rand(3, device="cuda"), drawn[0])


def test_everything_ends_with_the_redirection():
    before = {path: stock(path) for path in SIGNATURES}
    redirection = Redirection(DEVICE)
    redirection.on()
    redirection.off()
    assert {path: stock(path) for path in SIGNATURES} == before
