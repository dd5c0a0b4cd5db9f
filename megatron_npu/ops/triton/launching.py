"""Launch Triton kernels, and choose how many programs process a tensor."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_TILE = 4096  # values that a program has at a time, in registers
_PER_PROCESSOR = 4  # programs on each of a GPU's processors where a program takes many rows
_PROCESSORS = 108  # where there is no GPU to ask: kernels interpreted on a CPU, fake tensors
_PLAIN = (Tensor, torch.nn.Parameter)


def launch(kernel: Any, grid: tuple[int, ...], result: Tensor, *args: Any, **options: Any) -> None:
    """Launch a Triton kernel on the current stream.

    Args:
        kernel: a function of ``kernels``.
        grid: the numbers of programs; nothing is started if one of them is 0.
        result: the first tensor that is written, which determines the device. Nothing is launched for a fake
            tensor.
        args, options: the arguments and options of the kernel.
    """
    if 0 in grid or is_fake(result):
        return
    device = result.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


def is_fake(tensor: Tensor) -> bool:
    """Return True if a tensor has a shape but no data, as during tracing."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "fake_mode")


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least ``size``."""
    return 1 << max(0, size - 1).bit_length()


@functools.lru_cache(maxsize=256)
def tile_of(rows: int, width: int) -> tuple[int, int, tuple[int, int]]:
    """Return the size of a tile (rows and columns) for elementwise kernels, and the grid that covers the
    tensor.
    """
    columns = min(1024, max(16, power_of_two(width)))
    tall = min(_TILE // columns, power_of_two(rows))
    return tall, columns, (-(-rows // tall), -(-width // columns))


@functools.lru_cache(maxsize=256)
def chunks_of(rows: int, width: int, device: torch.device) -> tuple[int, int, int, tuple[int, int]]:
    """Return the tile and the grid for programs that each process many rows; see ``tile_of``.

    The number of rows per program precedes the grid.
    """
    tall, columns, (tiles, across) = tile_of(rows, width)
    wanted = max(1, _PER_PROCESSOR * processors(device) // across)
    per = -(-tiles // wanted) * tall
    return tall, columns, per, (-(-rows // per) if per else 0, across)


@functools.lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors that a GPU has."""
    if device.type != "cuda":
        return _PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
