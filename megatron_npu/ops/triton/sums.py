"""Sum the rows of a matrix in fp32, always in the same order and without atomics."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.triton.launching import chunks_of, launch

_ROWS, _COLUMNS = 64, 32  # of partial sums, for a program of the second stage


def sum_of_rows(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum ``[h]`` of the rows of ``[..., h]``."""
    from megatron_npu.ops.triton.kernels import sums as kernels

    matrix = matrix.contiguous()
    width = matrix.size(-1)
    rows = matrix.numel() // max(1, width)
    tall, columns, per, grid = chunks_of(rows, width, matrix.device)
    partial = new_partial(matrix, grid[0], width)
    launch(kernels.of_chunks, grid, partial, matrix, partial, rows, width, per, tall, columns, num_warps=8)
    return sum_of_partial(partial, dtype)


def new_partial(like: Tensor, chunks: int, width: int) -> Tensor:
    """Return a buffer for ``chunks`` partial sums, on the device of the tensor ``like``."""
    return torch.empty((chunks, width), dtype=torch.float32, device=like.device)


def sum_of_partial(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum ``[width]`` over the partial sums ``[chunks, width]``."""
    from megatron_npu.ops.triton.kernels import sums as kernels

    chunks, width = partial.shape
    total = torch.empty(width, dtype=dtype, device=partial.device)
    grid = (-(-width // _COLUMNS),)
    launch(kernels.of_columns, grid, total, partial, total, chunks, width, _ROWS, _COLUMNS, num_warps=4)
    return total
