"""Common code for benchmarks of single operations: start megatron-core, and load it unpatched."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType


def start_megatron() -> None:
    """Initialize model parallelism with one process, and seed Megatron's generators."""
    import megatron_npu

    megatron_npu.install()
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    store = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def untouched(name: str) -> ModuleType:
    """Return a second, unpatched copy of a module of megatron-core."""
    origin = importlib.util.find_spec(name).origin
    spec = importlib.util.spec_from_file_location(f"{name}_stock", origin)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
