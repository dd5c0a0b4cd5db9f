"""What benchmarks of single operations share: megatron-core as it was written, and the results' file."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import tempfile
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any


def start_megatron() -> None:
    """Join a model-parallel world of one process, and seed Megatron's generators."""
    import megatron_npu

    megatron_npu.install()
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    store = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def untouched(name: str) -> ModuleType:
    """Return a second copy of a module of megatron-core, which no patch has touched."""
    origin = importlib.util.find_spec(name).origin
    spec = importlib.util.spec_from_file_location(f"{name}_stock", origin)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path: Path, results: dict[str, Any]) -> None:
    """Write results with versions, machine, load and date, under a temporary name first."""
    import torch
    from megatron.core import package_info

    from megatron_npu import devices

    content = {
        **results,
        "device": devices.current().name,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "megatron_core": package_info.__version__},
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "load": os.getloadavg()[0],
        "date": date.today().isoformat(),
    }
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _processor() -> str:
    """Return the processor's name, from /proc/cpuinfo where there is one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
