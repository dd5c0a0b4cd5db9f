"""Define what apex-style optimizers share, such as closures, rejected options, exact state dicts and
fused updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_npu.ops.optimizers.multi_tensor import group_by_dtypes


class FusedOptimizer(torch.optim.Optimizer):
    """Base class of ``FusedAdam`` and ``FusedSGD``, which make one fused call per parameter group, device and
    dtype.

    Args:
        params: parameters or groups.
        defaults: default settings of a parameter group.
        set_grad_none: whether ``zero_grad()`` drops gradients (True) or zeroes them in place.
    """

    # What a constructor sets in addition to the groups; a copy or a pickle has it too.
    _options: tuple[str, ...] = ("set_grad_none",)

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], set_grad_none: bool) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """Return the optimizer's attributes for ``copy.deepcopy`` and ``pickle``.

        torch's base class omits those of this class.
        """
        return {**super().__getstate__(), **{name: vars(self)[name] for name in self._options}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the optimizer from a copy, a pickle or a loaded state, and keep the settings of the
        parameter groups.

        torch 2.13 adds ``differentiable``, a setting of its own optimizers, to the defaults here. The setting
        would then be added to the groups, and a checkpoint saved after a resume would differ from the one
        that was loaded.
        """
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set the gradients of all parameters to None or zero.

        ``set_to_none`` overrides the constructor's setting.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **moved: Any) -> Any:
        """Update every parameter that has a gradient, and return the result of the function ``closure``.

        Raises:
            ValueError: an argument is given that only early versions of apex accept (``grads``, ``scale``,
                ...).
        """
        given = sorted(name for name, value in moved.items() if value is not None)
        if given:
            raise ValueError(f"step() accepts only a closure, but got {', '.join(given)}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(
                group, [p for p in group["params"] if self._gradient(p) is not None and p.numel()]
            )
        return loss

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        raise NotImplementedError

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient tensor that an optimizer step uses for a parameter."""
        return parameter.grad

    def _dense_gradient(self, parameter: Tensor) -> Tensor:
        """Return a parameter's gradient, which must exist and be dense.

        Raises:
            ValueError: the gradient is sparse.
        """
        grad = self._gradient(parameter)
        if grad is None or grad.is_sparse:
            raise ValueError(f"{type(self).__name__} does not support sparse gradients")
        return grad

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that was saved by this class, or by the corresponding optimizer of apex or torch.

        torch casts state to the dtype and device of its parameter, which would round the fp32 moments of a
        16-bit parameter. Therefore, state with the parameter's shape is withheld from torch and loaded as
        saved.
        """
        shapes = {
            key: parameter.shape
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False)
            for parameter, key in zip(group["params"], saved["params"], strict=False)
        }
        rest = {
            key: {name: value for name, value in state.items() if not _shaped(value, shapes.get(key))}
            for key, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": rest})
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved_group["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    if _shaped(value, parameter.shape):
                        self.state[parameter][name] = self._placed(parameter, name, value)
            for name, value in self.defaults.items():  # torch's groups lack what only apex has
                group.setdefault(name, value)

    def _placed(self, parameter: Tensor, name: str, value: Tensor) -> Tensor:
        """Move a parameter's loaded state to the device of the parameter."""
        return value.to(parameter.device)


def _shaped(value: Any, shape: torch.Size | None) -> bool:
    return torch.is_tensor(value) and value.shape == shape


def update_fused(rows: Sequence[tuple[Tensor, ...]], update: Callable[..., None]) -> None:
    """Update the columns of ``rows`` in place, by calling ``update`` once for each device and dtype.

    A row consists of a parameter, its gradient and its state. Rows that torch's fused kernels do not support
    are copied, updated and copied back.
    """
    twins = [_precise_twins(row) for row in rows]
    for columns in group_by_dtypes(twins):
        update(*columns)
    for (target, _, *state), (new_target, _, *new_state) in zip(rows, twins, strict=True):
        for old, new in zip((target, *state), (new_target, *new_state), strict=True):
            if new is not old:
                old.copy_(new)


def _precise_twins(row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert tensors to fp32 and to the strides of the first tensor, as torch's fused kernels require.

    Tensors that differ are copied; for 16-bit weights with main weights, that is only the gradient.
    Otherwise, torch 2.13's kernels for the CPU would be silently wrong: they assume equal strides, and SGD
    leaves most of a 16-bit parameter unchanged (pytorch issue 191763).
    """
    first = row[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    strides = torch.Tensor.stride  # Megatron-LM 285068c8 has a parameter with stride = 1 (T5's head)
    return tuple(
        t
        if t.dtype is dtype and strides(t) == strides(first)
        else torch.empty_like(first, dtype=dtype).copy_(t)
        for t in row
    )
