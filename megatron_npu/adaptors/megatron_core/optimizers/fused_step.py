"""Fuse Adam's step on a GPU with gradient clipping and with the rounding of weights to 16 bits.

Patches ``optimizer.clip_grads`` and ``optimizer.optimizer``. Without the fusion, each of these is another
pass over all parameters, of 8 and 6 bytes per parameter, in addition to the step's 28.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import around, fused_optimizer_present
from megatron_npu.adaptors.shared.decorators import upstream_compiles
from megatron_npu.ops.optimizers import adam_update
from megatron_npu.ops.optimizers.adam import FusedAdam

_OPTIMIZER = "megatron.core.optimizer"
_IS_OF = "megatron_npu_is_of"  # a parameter: the FusedAdam that steps it
_COPIES = "megatron_npu_copies"  # of a FusedAdam: its ``_Copies``


def _not_needed() -> str | None:
    return fused_optimizer_present() or upstream_compiles()


_on_cuda = partial(around, devices=("cuda",), condition=_not_needed)


@_on_cuda(
    f"{_OPTIMIZER}.clip_grads:clip_grad_by_total_norm_fp32",
    why=(
        "upstream's clipping reads and writes all gradients; our kernel multiplies them during the "
        "optimizer step"
    ),
)
def clip_in_the_step(
    original: Callable[..., None],
    parameters: list[Tensor] | Tensor,
    max_norm: float,
    total_norm: float,
    use_decoupled_grad: bool = False,
) -> None:
    """Defer gradient clipping to the optimizer's next step, if an optimizer has exactly the given parameters.

    The gradients are not changed; they are zeroed before they are read again.
    """
    optimizer = None
    if not (torch.is_tensor(parameters) or use_decoupled_grad):
        optimizer = _optimizer_of(parameters)
    if optimizer is None:
        original(parameters, max_norm, total_norm, use_decoupled_grad)
        return
    coefficient = max_norm / (total_norm + 1.0e-6)
    if coefficient < 1.0:
        optimizer.multiply_gradients(coefficient)


def _optimizer_of(parameters: Iterable[Any]) -> FusedAdam | None:
    """Return the optimizer whose parameters with a gradient are exactly the given ones, or None."""
    given = {parameter for parameter in parameters if parameter.grad is not None}
    found = {getattr(parameter, _IS_OF, None) for parameter in given}
    reference = found.pop() if len(found) == 1 else None
    optimizer = None if reference is None else reference()
    if optimizer is None:
        return None
    own = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    return optimizer if own == given else None


@_on_cuda(
    f"{_OPTIMIZER}.optimizer:Float16OptimizerWithFloat16Params.step_with_ready_grads",
    why="main weights are read again to be rounded; our kernel rounds them during the optimizer step",
)
def step_with_copies(original: Callable[[Any], bool], self: Any) -> bool:
    """Register the 16-bit weights that belong to Adam's fp32 main weights."""
    adam = self.optimizer
    if type(adam) is not FusedAdam or not adam_update.has_kernel(_first_of(adam)):
        return original(self)
    adam.copies = _copies(adam, self.float16_groups, self.fp32_from_float16_groups)
    try:
        return original(self)
    finally:
        adam.copies, adam.written = MappingProxyType({}), frozenset()


class _Copies(NamedTuple):
    """A map from main weights to 16-bit weights, with the tensors from which it was built."""

    of: Mapping[Tensor, Tensor]
    made_of: list[Tensor]


def _copies(adam: Any, models: list[list[Tensor]], mains: list[list[Tensor]]) -> Mapping[Tensor, Tensor]:
    """Return a map from main weights to 16-bit weights.

    The map is rebuilt only if the tensors have changed.

    At the same time, store in each parameter a reference to its optimizer.
    """
    parameters = [parameter for group in adam.param_groups for parameter in group["params"]]
    now = [*parameters, *chain.from_iterable(models), *chain.from_iterable(mains)]
    known: _Copies | None = getattr(adam, _COPIES, None)
    if known is not None and len(known.made_of) == len(now) and all(map(operator.is_, known.made_of, now)):
        return known.of
    reference = weakref.ref(adam)
    for parameter in parameters:
        setattr(parameter, _IS_OF, reference)
    pairs = zip(chain.from_iterable(mains), chain.from_iterable(models), strict=True)
    known = _Copies(dict(pairs), now)
    setattr(adam, _COPIES, known)
    return known.of


def _first_of(adam: FusedAdam) -> Tensor:
    return next((p for group in adam.param_groups for p in group["params"]), torch.empty(0))


@_on_cuda(
    f"{_OPTIMIZER}.optimizer:Float16OptimizerWithFloat16Params._copy_main_params_to_model_params",
    why="the optimizer step has already rounded them",
)
def copy_what_is_left(original: Callable[[Any], None], self: Any) -> None:
    """Round the main weights to 16 bits, unless the preceding step has already done this."""
    written: frozenset[Tensor] = getattr(self.optimizer, "written", frozenset())
    if not all(main in written for mains in self.fp32_from_float16_groups for main in mains):
        original(self)
