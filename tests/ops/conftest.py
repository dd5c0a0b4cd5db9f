"""Every operation runs on each device that is present."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_npu import devices
from megatron_npu.base import settings
from megatron_npu.ops import dispatch


def present() -> list[str]:
    """Return the names of the devices that can be used here; an error if the setting names another."""
    devices.select(settings.DEVICE.get())
    return devices.present()


@pytest.fixture(params=present())
def device(request) -> str:
    """Bind every operation to the device and return its name."""
    for operation in dispatch.OPERATIONS:
        operation.bind(request.param)
    return request.param


@pytest.fixture(autouse=True)
def bindings_end_with_the_test() -> Iterator[None]:
    """Whatever a test binds operations to, other tests of this process find them unbound."""
    yield
    for operation in dispatch.OPERATIONS:
        operation.unbind()


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request) -> torch.dtype:
    return request.param
