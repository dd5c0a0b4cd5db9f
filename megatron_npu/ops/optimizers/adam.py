"""Implement Adam and AdamW with the interface of FusedAdam from apex and TransformerEngine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_npu.ops.dispatch import Make
from megatron_npu.ops.optimizers import adam_update, narrow_states, swapped_memory
from megatron_npu.ops.optimizers.adam_update import AdamStep, update_adam
from megatron_npu.ops.optimizers.fused_optimizer import FusedOptimizer, update_fused
from megatron_npu.ops.optimizers.multi_tensor import local_parts
from megatron_npu.ops.optimizers.narrow_states import Row


class FusedAdam(FusedOptimizer):
    """Adam (Kingma and Ba 2015) or AdamW (Loshchilov and Hutter 2019), with one fused call per group.

    A drop-in replacement for ``apex.optimizers.FusedAdam`` with the same order of arguments: ``step`` is one
    integer per parameter group, and the state is ``exp_avg`` and ``exp_avg_sq`` in fp32. ``load_state_dict``
    also accepts what ``torch.optim.Adam`` and ``AdamW`` saved. Megatron's distributed optimizer relies on
    exactly that form; with torch's own AdamW, it resumes incorrectly (megatron-core 0.16: one shared step
    tensor, counted once per parameter). Distributed tensors (FSDP2's) keep distributed state. Each rank
    updates its part, and also has the (empty) state of parameters of which it holds nothing, in one order,
    because saving ranks exchange the shapes of each.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: as defined in the papers.
        bias_correction: whether to divide the moments by 1 - betaᵗ.
        adam_w_mode: whether weight decay is decoupled (AdamW); False adds the decay to the gradient (Adam).
        amsgrad: must be False, as in apex.
        set_grad_none: whether ``zero_grad()`` drops gradients.
        capturable: must be False, because CUDA graph capture is not supported.
        master_weights: whether to keep an fp32 copy of each 16-bit parameter in state ``master_param``
            (TransformerEngine's name) and round from it; without it, 16-bit parameters are updated in fp32
            and rounded at every step.
        use_decoupled_grad: whether to read gradients from ``decoupled_grad``, whose dtype may differ from the
            parameter's, and keep a ``master_param`` for every parameter; for an fp32 parameter, it is the
            parameter itself.
        master_weight_dtype: fp32, or fp16 with a scale per tensor.
        exp_avg_dtype, exp_avg_sq_dtype: the dtypes of the moments: fp32, bf16, or fp16 with a scale per
            tensor.
        store_param_remainders: for bf16 parameters with fp32 main weights, whether to store only the 16 bits
            that the parameter lacks (``remainders``), which saves 2 bytes per parameter, with identical
            results.
        others: other options of TransformerEngine's class, which are rejected unless they are off.

    Attributes:
        copies: maps fp32 parameters to the 16-bit tensors that a step rounds them to, if a kernel does both
            at once; ``written`` contains those already written.
        swap_moments: whether to keep fp32 moments in host memory, where the NPU's kernel updates them, which
            saves 8 bytes per parameter on the device, with identical results. This setting is a class
            attribute, used by optimizers built afterwards, because Megatron, which builds them, has no
            argument for it.

    Raises:
        ValueError: an option is not supported by this optimizer.
    """

    swap_moments = False
    # of a step that runs, or comes next: no copy of an optimizer takes them along
    copies: Mapping[Tensor, Tensor] = MappingProxyType({})
    written: frozenset[Tensor] = frozenset()
    _factor = 1.0
    _known: dict[Tensor, adam_update.Known]  # what the kernel took in the step before

    _options = (
        "set_grad_none",
        "adam_w_mode",
        "master_weights",
        "use_decoupled_grad",
        "store_param_remainders",
        "swap_moments",
        "_dtypes",
        "_scales",
    )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the optimizer from a copy, a pickle or a state dict, and drop its cached values."""
        super().__setstate__(state)
        self._known = {}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        **others: Any,
    ) -> None:
        options = {"amsgrad": amsgrad, "capturable": capturable, **others}
        refused = [name for name, value in options.items() if value]
        if refused:
            raise ValueError(f"FusedAdam does not support {', '.join(sorted(refused))}")
        self._dtypes = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        for name, dtype in self._dtypes.items():
            if dtype not in _DTYPES[name]:
                raise ValueError(f"FusedAdam stores {name} in {_DTYPES[name]}, but {dtype} was requested")
        self._scales: dict[Tensor, tuple[Tensor, ...]] = {}
        self._known = {}
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders
        self.swap_moments = type(self).swap_moments
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, set_grad_none)

    def _initialize_shards(self, parameters: list[Any]) -> None:
        """Create the states of empty shards, so that all ranks save states in the same order."""
        for parameter in parameters:
            if hasattr(parameter, "to_local") and parameter.requires_grad and parameter not in self.state:
                self.initialize_state(parameter)

    def multiply_gradients(self, factor: float) -> None:
        """Multiply the gradients by ``factor`` in the next step; the gradient tensors may stay unchanged."""
        self._factor *= factor

    def step(self, closure: Callable[[], Any] | None = None, **moved: Any) -> Any:
        """Update every parameter that has a gradient, and return the result of the function ``closure``."""
        self.written = frozenset()
        try:
            return super().step(closure, **moved)
        finally:
            self._factor = 1.0

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        group["step"] = int(group.get("step", 0)) + 1
        step = AdamStep(
            number=group["step"] if group["bias_correction"] else None,
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(self.adam_w_mode),
        )
        self._initialize_shards(group["params"])
        rows = [self._row(parameter) for parameter in self._without_kernel(parameters, step)]
        self._update([row for row in rows if row.weight.numel()], step)  # a rank may hold none of a weight

    def _update(self, rows: list[Row], step: AdamStep) -> None:
        if self._factor != 1.0 and rows:
            torch._foreach_mul_([row.grad for row in rows], self._factor)
        update = functools.partial(update_adam, step=step)
        narrow_states.update_in_blocks([row for row in rows if narrow_states.is_narrow(row)], update)
        rows = [row for row in rows if not narrow_states.is_narrow(row)]
        update_fused([(row.main, row.grad, row.first, row.second) for row in rows], update)
        for row in rows:
            if row.main is not row.weight:
                row.weight.copy_(row.main)

    def _without_kernel(self, parameters: list[Tensor], step: AdamStep) -> list[Tensor]:
        """Update the parameters that the GPU kernel supports, and return the other parameters."""
        weights = (self._row(parameter).weight for parameter in parameters)
        first = next((weight for weight in weights if weight.numel()), None)
        if first is None or not adam_update.has_kernel(first):
            return parameters
        taken, left, written = [], [], []
        for parameter in parameters:
            tensors = self._for_kernel(parameter)
            if tensors is None:
                left.append(parameter)
                continue
            taken.append(tensors)
            if tensors.copy is not None:
                written.append(parameter)
        adam_update.update_by_kernel(taken, step, self._factor)
        self.written |= frozenset(written)
        return left

    def _for_kernel(self, parameter: Tensor) -> adam_update.Tensors | None:
        """Return the GPU kernel's inputs for a parameter, or None if the kernel does not support it.

        The inputs of the last step are reused, with the new gradient, as long as the tensors and their
        devices are the same: inspecting each tensor again took longer than the launch.
        """
        known, copy, grad = self._known.get(parameter), self.copies.get(parameter), parameter.grad
        if known is not None and known.stands(self.state.get(parameter), copy) and adam_update.is_plain(grad):
            return known.tensors._replace(grad=grad)
        row = self._row(parameter)
        beside = row.main is not row.weight  # a main weight
        tensors = adam_update.Tensors(
            row.main, row.grad, row.first, row.second, row.weight if beside else copy
        )
        if row.scales or not row.weight.numel() or not adam_update.takes(tensors):
            return None
        if grad is row.grad:  # a sharded gradient has other parts in each step
            self._known[parameter] = adam_update.Known(
                self.state[parameter], copy, tensors._replace(grad=row.main)
            )
        return tensors

    @torch.no_grad()
    def initialize_state(self, parameter: Tensor) -> None:
        """Create the optimizer state of a parameter: zero moments and, if it needs one, the main weight."""
        dtypes = self._dtypes_of(parameter)
        state = {
            name: swapped_memory.zeros(parameter, dtype)
            if self._swaps(parameter, name, dtype)
            else torch.zeros_like(parameter, dtype=dtype)
            for name, dtype in dtypes.items()
        }
        self.state[parameter] = state
        if dtypes.get("master_param") is parameter.dtype:
            # It is the main weight itself: Megatron's checkpoints look for one of every parameter.
            state["master_param"] = parameter.detach()
        elif dtypes.get("master_param") in (torch.float32, torch.float16):  # of a remainder, zero is right
            self.set_scaled_state(parameter, "master_param", parameter.detach())

    def _swaps(self, parameter: Tensor, name: str, dtype: torch.dtype) -> bool:
        """Return True if part of this parameter's optimizer state is in host memory."""
        fp32_moment = name in _MOMENT_NAMES and dtype is torch.float32
        return self.swap_moments and fp32_moment and parameter.device.type == "npu" and parameter.numel() > 0

    def _placed(self, parameter: Tensor, name: str, value: Tensor) -> Tensor:
        if self._swaps(parameter, name, value.dtype):
            return swapped_memory.moved(value, like=parameter)
        if swapped_memory.is_swapped(value):  # of the optimizer that was swapped before it was saved
            value = torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)
        return super()._placed(parameter, name, value)

    def _dtypes_of(self, parameter: Tensor) -> dict[str, torch.dtype]:
        """Return the names of a parameter's optimizer states and the dtypes in which they are stored."""
        precise = torch.promote_types(parameter.dtype, torch.float32)
        dtypes = {name: precise if d is torch.float32 else d for name, d in self._dtypes.items()}
        if not self.master_weights or (parameter.dtype is precise and not self.use_decoupled_grad):
            del dtypes["master_param"]
        elif parameter.dtype is precise:
            dtypes["master_param"] = precise
        elif (
            self.store_param_remainders
            and parameter.dtype is torch.bfloat16
            and dtypes["master_param"] is torch.float32
        ):
            dtypes["master_param"] = torch.int16
        return dtypes

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        return getattr(parameter, "decoupled_grad", None) if self.use_decoupled_grad else parameter.grad

    def _row(self, parameter: Tensor, grad: Tensor | None = None) -> Row:
        """Return this rank's parts of a parameter, its gradient and its state, creating a missing state.

        Args:
            parameter: a parameter of this optimizer.
            grad: the gradient to use instead of the parameter's own, for callers that need only the state.
        """
        if "exp_avg" not in self.state[parameter]:
            self.initialize_state(parameter)
        state = self.state[parameter]
        main = state.get("master_param", parameter)
        if main.dtype is parameter.dtype:
            main = parameter
        grad = self._dense_gradient(parameter) if grad is None else grad
        weight, grad, first, second, own_main = local_parts(
            (parameter, grad, state["exp_avg"], state["exp_avg_sq"], main)
        )
        row = Row(weight, grad, first, second, weight if main is parameter else own_main)
        return replace(row, scales=self._scales_of(parameter, row))

    def _scales_of(self, parameter: Tensor, row: Row) -> tuple[Tensor, ...]:
        """Return the scales of a parameter's state, or an empty tuple if no part of the state is fp16."""
        kept = (row.first, row.second, row.main if row.main is not row.weight else row.first)
        if all(tensor.dtype is not torch.float16 for tensor in kept):
            return ()
        if parameter not in self._scales:
            self._scales[parameter] = tuple(
                torch.ones((), dtype=torch.float32, device=row.weight.device) for _ in kept
            )
        return self._scales[parameter]

    @torch.no_grad()
    def get_unscaled_state(self, parameter: Tensor, name: str) -> Tensor:
        """Return a parameter's ``exp_avg``, ``exp_avg_sq`` or ``master_param`` in fp32, possibly as a copy.

        Checkpoints contain fp32 values regardless of the state's dtypes, so that an optimizer with other
        dtypes can load them.
        """
        return narrow_states.unscaled(self._row(parameter, grad=parameter), _PARTS[name])

    @torch.no_grad()
    def set_scaled_state(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Set a parameter's ``exp_avg``, ``exp_avg_sq`` or ``master_param`` to the fp32 tensor ``value``.

        If remainders are stored, the parameter itself becomes the rounded main weight.
        """
        narrow_states.set_unscaled(self._row(parameter, grad=parameter), _PARTS[name], value)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, including those in ``decoupled_grad``.

        ``set_to_none`` overrides the constructor's setting.
        """
        super().zero_grad(set_to_none)
        forget = self.set_grad_none if set_to_none is None else set_to_none
        for parameter in (p for group in self.param_groups for p in group["params"]):
            grad = getattr(parameter, "decoupled_grad", None)
            if grad is not None and forget:
                parameter.decoupled_grad = None
            elif grad is not None:
                grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in its storage dtypes, with ``scales`` (fp32 ``[3]``) if a part of it is fp16."""
        result = super().state_dict()
        for group, saved_group in zip(self.param_groups, result["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved_group["params"], strict=True):
                if parameter in self._scales:
                    scales = torch.stack(self._scales[parameter])
                    result["state"][key] = {**result["state"][key], "scales": scales}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that was saved by this class, by apex's FusedAdam, or by torch's Adam or AdamW.

        State that was saved in other dtypes is converted to the dtypes of this optimizer.

        Raises:
            ValueError: parameters of one group are at different steps, or amsgrad was enabled.
        """
        super().load_state_dict(state_dict)
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if group.get("amsgrad"):
                raise ValueError("the state dict was saved with amsgrad, which FusedAdam does not support")
            states = [self.state[p] for p in group["params"] if p in self.state]
            steps = {int(state.pop("step")) for state in states if "step" in state}
            if len(steps) > 1:
                raise ValueError(
                    "all parameters of a group must be at the same step, but they are at steps "
                    f"{sorted(steps)}"
                )
            if steps:
                group["step"] = steps.pop()
            for parameter, key in zip(group["params"], saved_group["params"], strict=True):
                if "exp_avg" in self.state.get(parameter, {}):
                    self._convert(parameter, state_dict["state"][key].get("scales"))

    @torch.no_grad()
    def _convert(self, parameter: Tensor, scales: Tensor | None) -> None:
        """Convert the loaded state of a parameter to the dtypes and the memory that this optimizer uses."""
        loaded = self.state[parameter]
        loaded.pop("scales", None)
        self._scales.pop(parameter, None)
        if scales is not None:
            self._scales[parameter] = tuple(scales.to(parameter.device, torch.float32).clone().unbind())
        own = self._dtypes_of(parameter)
        if own.get("master_param") is parameter.dtype and "master_param" in loaded:
            parameter.copy_(loaded["master_param"])
            loaded["master_param"] = parameter.detach()
        if all(loaded[name].dtype is own.get(name) for name in loaded):
            return
        values = {name: self.get_unscaled_state(parameter, name) for name in loaded}
        self._scales.pop(parameter, None)
        self.state[parameter] = {}
        self.initialize_state(parameter)
        for name, value in values.items():  # the main weight last: its flag rests in a moment
            if name in self.state[parameter]:
                self.set_scaled_state(parameter, name, value)


_MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
_MOMENTS = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = {"exp_avg": _MOMENTS, "exp_avg_sq": _MOMENTS, "master_param": (torch.float32, torch.float16)}
_PARTS = {"exp_avg": "first", "exp_avg_sq": "second", "master_param": "main"}


@update_adam.example()
def _example(make: Make) -> None:
    parameter = torch.nn.Parameter(make(33, 65).detach())
    parameter.grad = make(33, 65).detach()
    FusedAdam([parameter], lr=0.1).step()
