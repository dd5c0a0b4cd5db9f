"""Implement NVIDIA GPUs as a device, leaving ``torch.cuda`` unchanged."""

from __future__ import annotations

import torch

from megatron_npu.devices.base import Device, MemoryStatistics


class CudaDevice(Device):
    """An NVIDIA GPU, used through torch's CUDA build and NCCL."""

    name = "cuda"
    backend = "nccl"

    def absence(self) -> str | None:
        if not torch.backends.cuda.is_built():
            return f"torch {torch.__version__} is built without CUDA"
        return None if torch.cuda.is_available() else "torch finds no CUDA device"

    def count(self) -> int:
        return torch.cuda.device_count()

    def torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def set_current(self, index: int) -> None:
        torch.cuda.set_device(index)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def memory(self) -> MemoryStatistics:
        return MemoryStatistics(
            torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
        )

    def utilization(self) -> float | None:
        try:
            return torch.cuda.utilization() / 100
        except Exception:  # without NVML (the package nvidia-ml-py), or where it is not allowed
            return None

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()
