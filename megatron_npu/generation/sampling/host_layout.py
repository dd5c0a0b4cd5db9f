"""Memory layout of weights that is fastest for generation on a CPU."""

from __future__ import annotations

from typing import Any

import torch


def lay_out_for_vectors(gpt: Any) -> None:
    """Store the matrices of a GPTModel's linear layers by columns; their shapes stay as they are.

    One token at a time is a product of matrix and vector, which takes as long as the matrix takes to be read:
    with fp32 on one core half as long so, as each row of the transposed matrix is added to the result. No
    memory is needed beside a copy of one matrix. Not for a model that is trained.

    Args:
        gpt: on the host.
    """
    for name, parameter in gpt.named_parameters():
        if parameter.dim() == 2 and parameter.dtype == torch.float32 and "position_embeddings" not in name:
            parameter.data = parameter.data.t().contiguous().t()
