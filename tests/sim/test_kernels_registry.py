"""How torch reaches the kernels: schemas, autograd, devices, and operations that have none."""

from __future__ import annotations

import inspect

import pytest
import torch

from megatron_npu.sim import kernels
from megatron_npu.sim.kernels import registry

kernels.declare()
pytestmark = pytest.mark.simulated


def schema(operation: str) -> torch._C.FunctionSchema:
    """Return the schema of torch_npu (or aten) of a kernel's operation."""
    base, _, overload = operation.partition(".")
    for namespace in registry.NAMESPACES:
        packet = getattr(getattr(torch.ops, namespace), base, None)
        if packet is not None and (overload or "default") in packet.overloads():
            return getattr(packet, overload or "default")._schema
    raise AssertionError(f"this torch_npu does not define {operation}")


def test_this_torch_npu_defines_every_operation():
    assert kernels.register() == []


@pytest.mark.parametrize("operation", sorted(registry.KERNELS))
def test_parameters_are_those_of_the_schema(operation):
    parameters = inspect.signature(registry.KERNELS[operation].function).parameters.values()
    arguments = schema(operation).arguments
    assert [p.name for p in parameters] == [a.name for a in arguments]
    for parameter, argument in zip(parameters, arguments, strict=True):
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        default = argument.default_value if argument.has_default_value() else parameter.empty
        assert parameter.default == default, argument.name


@pytest.mark.parametrize("operation", sorted(registry.KERNELS))
def test_the_device_runs_the_kernel(operation):
    from megatron_npu.sim.install import COVERAGE

    assert {f"{namespace}::{operation}" for namespace in registry.NAMESPACES} & set(COVERAGE.computed)


def test_an_operation_counts_as_one_launch_and_keeps_torch_npus_formula():
    import torch_npu

    x = torch.randn(2, 8).npu().requires_grad_()
    result = torch_npu.npu_swiglu(x)
    assert type(result.grad_fn).__name__ == "NpuSwigluBackward0"


def test_host_tensors_are_refused():
    import torch_npu

    x, gamma = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(NotImplementedError, match=r"npu_rms_norm.*'CPU' backend"):
        torch_npu.npu_rms_norm(x, gamma)
    with pytest.raises(RuntimeError, match="same device"):
        torch_npu.npu_rms_norm(x.npu(), gamma)
    assert torch_npu.npu_rms_norm(x.npu(), gamma.npu())[0].shape == (2, 8)


def test_an_operation_without_a_kernel_says_where_one_would_be_added():
    import torch_npu

    with pytest.raises(NotImplementedError, match=r"npu::npu_geglu has no kernel.*megatron_npu/sim/kernels"):
        torch_npu.npu_geglu(torch.ones(2, 8).npu())
