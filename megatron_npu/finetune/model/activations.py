"""Apply activation checkpointing, which saves only a block's input and recomputes the rest in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_npu.finetune.model.blocks import repeated_blocks


def checkpoint_activations(model: nn.Module) -> str:
    """Make the model's blocks recompute their activations, and return a log line.

    Transformers models use their built-in gradient checkpointing, which also disables KV caches. The states
    of the random generators are restored for the recomputation, so that dropout drops the same values.
    """
    inner: Any = model
    if hasattr(inner, "get_base_model"):  # peft's wrapper
        inner = inner.get_base_model()
    if getattr(inner, "supports_gradient_checkpointing", False):
        _transformers_own(inner)
        return (
            f"activations: {type(inner).__name__} recomputes the activations of its blocks through its "
            "own setting"
        )
    blocks = repeated_blocks(model)
    for _, block in blocks:
        block.forward = _checkpointed(block)  # type: ignore[method-assign]
    if not blocks:
        return "activations: this model has no repeated blocks, so nothing is recomputed"
    return f"activations: the activations of {len(blocks)} blocks are recomputed"


def _transformers_own(model: Any) -> None:
    """Enable the gradient checkpointing that is built into Transformers.

    Version 5 renamed the method for this.
    """
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, name):
            getattr(model, name)({"use_reentrant": False})
            return


def _checkpointed(block: nn.Module) -> Callable[..., Any]:
    """Return a forward function that, if gradients are required, saves only the block's input."""
    forward = block.forward

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
        return forward(*args, **kwargs)

    return checkpointed
