"""Whole lists of tensors in one call: norms and scaling, with the calling convention of ``amp_C``."""

from __future__ import annotations

import torch
from torch import Tensor


def multi_tensor_l2norm(
    chunk_size: int, overflow: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the L2 norm of all tensors of the first list as one vector, fp32 ``[1]``.

    Args:
        chunk_size: part of apex's convention, not used.
        overflow: part of apex's convention, not used.
        tensor_lists: one list of tensors.
        per_tensor: return the norm of each tensor too, ``[n]``.
    """
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(tensor_lists[0])])
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else None


def multi_tensor_scale(
    chunk_size: int, overflow: Tensor, tensor_lists: list[list[Tensor]], scale: float | Tensor
) -> None:
    """Write ``source * scale`` into the tensors of the second list; the first list is the source."""
    sources, targets = tensor_lists
    if all(source is target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_mul_(targets, scale)
    else:
        torch._foreach_copy_(targets, torch._foreach_mul(sources, scale))
