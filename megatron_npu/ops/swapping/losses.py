"""Replace Transformers' loss functions, torch's loss module, and calls in forward methods that compute a
loss over a vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_npu import devices
from megatron_npu.ops.cross_entropy import cross_entropy
from megatron_npu.ops.swapping import heads
from megatron_npu.ops.swapping.found import (
    Found,
    Left,
    Replacement,
    called_as,
    has_forward_of,
    names_in_forward,
    own_forward,
)

_SMALLEST = 256  # classes; below, torch's own is as good
_BY = f"cross_entropy, for {_SMALLEST} or more classes"


def recognise(module: Any) -> Found:
    """Return the replacement for torch's loss module, or for a module whose forward method calls torch's
    loss.
    """
    if has_forward_of(module, nn.CrossEntropyLoss):
        reason = _beyond(module.weight, module.reduction, module.label_smoothing)
        return Left("loss", reason) if reason else Replacement("loss", _BY, _with_our_loss)
    names = names_in_forward(module)
    if names & {"CrossEntropyLoss", "cross_entropy"}:
        classes = getattr(module, "num_labels", None)  # of a head of Transformers
        if isinstance(classes, int) and classes < _SMALLEST and "split" not in names:  # into starts and ends
            return Left("loss", f"{classes} classes: below {_SMALLEST}, torch's own loss is as fast")
        return Replacement("loss", _BY, _with_our_loss)
    return None


def loss_function_of(model: nn.Module) -> Callable[..., Tensor] | str | None:
    """Return the replacement for a Transformers model's ``loss_function``, or the reason why it is left
    unchanged.
    """
    if not hasattr(type(model), "loss_function") or "loss_function" not in names_in_forward(model):
        return None
    theirs = model.loss_function
    ours = _BY_NAME.get(getattr(theirs, "__name__", ""))
    if ours is not None and theirs.__module__ == "transformers.loss.loss_utils":
        return ours
    return f"{getattr(theirs, '__name__', theirs)} is not a loss over a vocabulary"


def is_ours(model: nn.Module) -> bool:
    """Return True if a model's vocabulary loss is replaced, in its forward method or in a loss module
    that it contains.
    """
    own = [child for child in model.children() if has_forward_of(child, nn.CrossEntropyLoss)]
    return any(isinstance(recognise(part), Replacement) for part in (model, *own))


def _causal_lm(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Compute Transformers' ``ForCausalLMLoss``, in which each token is predicted from the tokens before
    it.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return _masked_lm(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)


def _masked_lm(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **others: Any,
) -> Tensor:
    """Compute Transformers' ``ForMaskedLMLoss`` without an fp32 copy of the logits, or without the logits
    at all.
    """
    target = labels.reshape(-1).to(logits.device)
    losses = None
    if isinstance(logits, heads.Unmade) and logits.size(-1) == vocab_size:
        losses = logits.losses(target, ignore_index)
    if losses is None:
        losses = _losses(logits.reshape(-1, vocab_size), target, ignore_index)
    if num_items_in_batch is None:
        return losses.sum() / (target != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(losses.device)
    return losses.sum() / num_items_in_batch


_BY_NAME = {"ForCausalLMLoss": _causal_lm, "ForMaskedLMLoss": _masked_lm}


def _losses(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    if torch.compiler.is_compiling() or logits.device.type != devices.current().name:
        return F.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction="none")
    return cross_entropy(logits, target, ignore_index)


def _with_our_loss(module: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return own_forward(module, *args, **kwargs)
    with called_as("cross_entropy", _torch_loss, module):
        return own_forward(module, *args, **kwargs)


def _torch_loss(
    theirs: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute ``F.cross_entropy`` with our operation if possible, and otherwise with the original function
    ``theirs``.

    The result has the dtype of torch's result.
    """
    plain = size_average is None and reduce is None and _beyond(weight, reduction, label_smoothing) is None
    if not plain or not _is_of_tokens(input, target):
        return theirs(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    losses = input.losses(target, ignore_index) if isinstance(input, heads.Unmade) else None
    if losses is None:
        losses = cross_entropy(input, target, ignore_index)
    if reduction == "mean":
        losses = losses.sum() / (target != ignore_index).sum()
    return (losses.sum() if reduction == "sum" else losses).to(_dtype_of_torchs_loss(input))


def _is_of_tokens(input: Tensor, target: Tensor) -> bool:
    """Return True if the loss is computed over tokens on our device, with a sufficiently large vocabulary."""
    tokens = input.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
    return tokens and input.size(1) >= _SMALLEST and input.device.type == devices.current().name


def _dtype_of_torchs_loss(input: Tensor) -> torch.dtype:
    """Return the dtype of the result of ``F.cross_entropy``.

    Autocast computes it in fp32.
    """
    if torch.is_autocast_enabled(input.device.type):
        return torch.promote_types(input.dtype, torch.float32)
    return input.dtype


def _beyond(weight: Tensor | None, reduction: str, label_smoothing: float) -> str | None:
    if weight is not None:
        return "the loss has class weights"
    return "the loss uses label smoothing" if label_smoothing else None
