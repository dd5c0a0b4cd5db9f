"""Operations import where torch_npu and Megatron are absent: the original megatron_npu could not."""

from __future__ import annotations

import os
import sys

import pytest

from megatron_npu.base import settings
from tests.support import processes


@pytest.mark.skipif(settings.SIM.enabled(), reason="the case: a simulated process needs torch_npu to start")
def test_every_operation_imports_and_runs_without_torch_npu():
    code = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch_npu", "megatron", "apex", "amp_C", "transformer_engine", "triton"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
from megatron_npu import ops
for module in pkgutil.walk_packages(ops.__path__, "megatron_npu.ops."):
    if ".triton.kernels." not in module.name:
        importlib.import_module(module.name)
assert "triton" not in sys.modules
import torch
from megatron_npu.ops import activation
activation.bias_gelu(torch.ones(2, 3), torch.ones(3)).sum()
print(len(ops.dispatch.OPERATIONS))
"""
    environment = {**os.environ, "MEGATRON_NPU_DEVICE": "cpu", "MEGATRON_NPU_AUTOLOAD": "0"}
    done = processes.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10
