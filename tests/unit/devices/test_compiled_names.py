"""torch.compile takes redirected names of CUDA for the device's: on the CPU, and by tests/sim on the NPU."""

from __future__ import annotations

import os
import sys

from megatron_npu.base import settings
from megatron_npu.devices.redirect import Redirection
from tests.support import processes, warm

COMPILED = """
from typing import Optional
from megatron_npu import devices
from megatron_npu.devices.redirect import Redirection
Redirection(devices.select("{device}")).on()

def names(x):
    return torch.zeros(3, device="cuda") + x.to("cuda")
def autocast(x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return x.matmul(x) if torch.is_autocast_enabled() else x
def draw(x: torch.Tensor, generator: Optional[torch.Generator] = None) -> torch.Tensor:
    return x + torch.hann_window(3, device=x.device)

def compiled(function):
    return torch.compile(function, backend="eager", fullgraph=True)
assert compiled(names)(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
assert compiled(autocast)(torch.ones(3, 3, device="cuda")).dtype is torch.bfloat16
assert compiled(draw)(torch.ones(3)).shape == (3,)
import torch._inductor.compile_fx
import torch.fx.operator_schemas
"""
IMPORTED = "import sys, torch; assert 'torch._dynamo' in sys.modules"
NOT_IMPORTED = "import sys, torch; assert 'torch._dynamo' not in sys.modules"


def test_redirected_before_the_compiler_is_imported(redirection: Redirection) -> None:
    """In a process of its own: torch._dynamo reads the names of torch once, at its import."""
    code = NOT_IMPORTED + COMPILED.format(device=redirection.device.name)
    processes.run([sys.executable, "-c", code], check=True)


def test_redirected_after_the_compiler_was_imported(redirection: Redirection) -> None:
    """Without NPUs in a fork of a process that has imported it."""
    code = COMPILED.format(device=redirection.device.name)
    if settings.SIM.enabled():
        processes.run([sys.executable, "-c", f"import torch, torch._dynamo{code}"], check=True)
    else:
        warm.run([sys.executable, "-c", IMPORTED + code], env=os.environ, check=True)
