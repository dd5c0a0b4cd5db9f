"""Implement verify mode, which compares the operations in every layer with their references, forward and
backward.

``MEGATRON_NPU_VERIFY=attention,norm`` (or ``all``) compares the named operations at every call. An error is
the largest difference divided by the largest value of the reference, which is computed in fp32. Errors that
exceed the limit of their dtype are logged immediately; a summary with the worst layer of each operation is
printed when the process ends. The first module whose output is not finite is named as well, regardless of the
script.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_npu.base import settings

logger = logging.getLogger(__name__)

# Beyond these an implementation is suspect. An output is rounded once; a gradient, once or twice more.
LIMITS = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 4e-2}

# A gradient this much smaller than what came in is what cancellation left: compared with this part of it.
_CANCELLED = 1e-2

Implementation = Callable[..., Any]


@dataclass
class Finding:
    """Accumulated results of comparing one output of an operation with its reference in one layer."""

    largest: float = 0.0
    calls: int = 0
    beyond: int = 0


# (operation, layer, what: "output", "gradient of weight", ...) to what was found.
findings: dict[tuple[str, str, str], Finding] = {}
# Calls that drew random numbers, which no reference can repeat: {operation: calls}.
random_calls: dict[str, int] = {}


def watches(name: str, group: str) -> bool:
    """Return True if an operation is selected for verification."""
    return not settings.verified_operations().isdisjoint({name, group, "all"})


def with_reference(
    name: str,
    function: Implementation,
    reference: Implementation,
    draws: Callable[..., bool] | None = None,
    rounds_within: bool = False,
) -> Implementation:
    """Return ``function``, wrapped so that each call also runs ``reference`` and compares the results.

    The results do not change.

    A function that returns None works in place, and the tensors passed to it are compared. Calls that draw
    random numbers, according to ``draws``, are only counted. With ``rounds_within``, outputs are no more
    precise than the least precise input tensor.
    """
    if function is reference:
        return function
    _at_exit()

    @functools.wraps(function)
    def verified(*args: Any, **kwargs: Any) -> Any:
        if draws is not None and draws(*args, **kwargs):
            random_calls[name] = random_calls.get(name, 0) + 1
            return function(*args, **kwargs)
        call = _Call(name, reference, args, kwargs)
        result = function(*call.args, **call.kwargs)
        call.compare(result, rounds_within)
        return result

    return verified


class _Call:
    """A call under verification: its arguments, a hook on each gradient, and fp32 copies of tensors for
    the reference.
    """

    def __init__(
        self, name: str, reference: Implementation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.name, self.reference, self.layer = name, reference, current_layer()
        self.labels: list[str] = []
        self.dtypes: list[torch.dtype] = []
        self.inputs: list[Tensor] = []
        self.copies: list[Tensor] = []
        self.output_grads: dict[int, Tensor] = {}
        self.expected: list[Tensor] = []
        self.right_grads: tuple[Tensor | None, ...] | None = None
        self.floor = 0.0
        labels = list(inspect.signature(reference).parameters)
        self.args = tuple(self._take(value, labels[i]) for i, value in enumerate(args))
        self.kwargs = {key: self._take(value, key) for key, value in kwargs.items()}
        copies = iter(self.copies)
        self.reference_args = tuple(_exchange(value, copies) for value in args)
        self.reference_kwargs = {key: _exchange(value, copies) for key, value in kwargs.items()}

    def _take(self, value: Any, label: str) -> Any:
        """Record and copy the floating-point tensors in an argument.

        Return the argument with views that accept hooks.
        """
        if isinstance(value, (list, tuple)) and any(map(_is_float, value)):
            return _like(value, [self._take(v, f"{label}[{i}]") for i, v in enumerate(value)])
        if not _is_float(value):
            return value
        copy = value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
        if value.requires_grad and torch.is_grad_enabled():
            copy.requires_grad_()
            # a view, so that the hook sees this call's share of the gradient and nobody else's
            value = value.view_as(value)
        self.labels.append(label)
        self.dtypes.append(value.dtype)
        self.inputs.append(value)
        self.copies.append(copy)
        return value

    def compare(self, result: Any, rounds_within: bool) -> None:
        expected = self.reference(*self.reference_args, **self.reference_kwargs)
        if result is None:
            # 16 bits added to an fp32 buffer, for example
            dtype = _least_precise(self.dtypes)
            for label, ours, right in zip(self.labels, self.inputs, self.copies, strict=True):
                self._record(label, ours, right, dtype)
            return
        # what else is returned, a seed for the backward say, is no number to compare
        outputs, references = _tensors_of(result), _tensors_of(expected)
        for i, (a, b) in enumerate(zip(outputs, references, strict=True)):
            dtype = _least_precise([a.dtype, *self.dtypes]) if rounds_within else a.dtype
            self._record("output" if len(outputs) == 1 else f"output {i}", a, b, dtype)
            if a.requires_grad and b.requires_grad:
                self.expected.append(b)
                a.register_hook(functools.partial(self._output_grad, len(self.expected) - 1))
        if self.expected:
            self._watch_input_grads()

    def _watch_input_grads(self) -> None:
        for i, copy in enumerate(self.copies):
            if copy.requires_grad:
                self.inputs[i].register_hook(functools.partial(self._input_grad, i))

    def _output_grad(self, index: int, grad: Tensor | None) -> None:
        if grad is not None:  # None: nothing was computed from this output
            self.output_grads[index] = grad.detach().clone()

    def _input_grad(self, index: int, grad: Tensor | None) -> None:
        if grad is None:  # added to a buffer instead, by an operation that is compared itself
            return
        if self.right_grads is None:
            leaves = [copy for copy in self.copies if copy.requires_grad]
            pairs = [(self.expected[i], grad.to(self.expected[i])) for i, grad in self.output_grads.items()]
            outputs, output_grads = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(outputs, leaves, output_grads, allow_unused=True))
            self.right_grads = tuple(next(found) if c.requires_grad else None for c in self.copies)
            self.floor = max(g.abs().max().item() for g in self.output_grads.values()) * _CANCELLED
            self.output_grads.clear()
        right = self.right_grads[index]
        right = torch.zeros_like(self.copies[index]) if right is None else right
        self._record(f"gradient of {self.labels[index]}", grad, right, self.dtypes[index], self.floor)

    def _record(self, what: str, ours: Tensor, right: Tensor, dtype: torch.dtype, floor: float = 0.0) -> None:
        error = relative_error(ours.detach(), right.detach(), floor)
        finding = findings.setdefault((self.name, self.layer, what), Finding())
        finding.calls += 1
        finding.largest = max(finding.largest, error)
        limit = LIMITS.get(dtype, LIMITS[torch.float32])
        if error > limit:
            finding.beyond += 1
            logger.warning(
                "verify: %s, %s, %s: error %.2g exceeds the limit %.2g (%s)",
                self.name,
                self.layer,
                what,
                error,
                limit,
                dtype,
            )


def _tensors_of(result: Any) -> list[Tensor]:
    return [each for each in tree_leaves(result) if torch.is_tensor(each)]


def _least_precise(dtypes: list[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda dtype: LIMITS.get(dtype, 0.0))


def _is_float(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_floating_point()


def _exchange(value: Any, copies: Any) -> Any:
    """Replace the floating-point tensors in an argument with copies, in the same order as ``_Call._take``."""
    if isinstance(value, (list, tuple)) and any(map(_is_float, value)):
        return _like(value, [_exchange(v, copies) for v in value])
    return next(copies) if _is_float(value) else value


def _like(sequence: Any, items: list[Any]) -> Any:
    """Return ``items`` as a sequence of the same type as ``sequence``: a list, a tuple or a named tuple."""
    return sequence._make(items) if hasattr(sequence, "_make") else type(sequence)(items)


def relative_error(ours: Tensor, right: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference, divided by the largest value of ``right`` or by ``floor``, whichever is
    larger.

    The result is inf where only one of the two values is nan.
    """
    if ours.shape != right.shape:
        return float("inf")
    if not right.numel():
        return 0.0
    ours, right = ours.float(), right.float()
    same = (ours == right) | (ours.isnan() & right.isnan())
    difference = (ours - right).abs().masked_fill_(same, 0.0).max()
    peak = right.abs().nan_to_num_(0.0, 0.0, 0.0).max()
    error = (difference / peak.clamp_min_(max(floor, torch.finfo(torch.float32).tiny))).item()
    return error if error == error else float("inf")


def summary() -> str:
    """Return one line per operation, with its largest error and the layer in which this error occurred."""
    lines = []
    for name in sorted({key[0] for key in findings}):
        rows = {key: found for key, found in findings.items() if key[0] == name}
        worst = max(rows, key=lambda key: rows[key].largest)
        lines.append(
            f"verify: {name}: largest error {rows[worst].largest:.2g}, {worst[2]} of {worst[1]}; "
            f"{sum(f.calls for f in rows.values())} comparisons, {sum(f.beyond for f in rows.values())} "
            "above the limit"
        )
    for name, calls in sorted(random_calls.items()):
        lines.append(
            f"verify: {name}: {calls} calls not compared, because they draw random numbers (dropout)"
        )
    return "\n".join(lines)


@functools.cache
def _at_exit() -> None:
    """Print the summary of the verification when the process ends."""
    atexit.register(lambda: print(summary(), flush=True))


class _Stack(threading.local):
    """The stack of modules whose forward is running, outermost first.

    Each backward thread has its own stack.
    """

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []


_running = _Stack()
_names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


def current_layer() -> str:
    """Return the path, from the outermost module, of the module whose forward is currently running."""
    if not _running.modules:
        return "(outside any module)"
    return _names.get(_running.modules[-1]) or type(_running.modules[-1]).__name__


def _enter(module: torch.nn.Module, _: Any) -> None:
    if not _running.modules and module not in _names:
        for name, part in module.named_modules():
            _names.setdefault(part, name)  # a part run alone, when recomputed, keeps its full path
    _running.modules.append(module)


def _leave(module: torch.nn.Module, _: Any, output: Any) -> None:
    if _running.modules and _running.modules[-1] is module:
        _running.modules.pop()
    if _bad_output.where is None and settings.VERIFY.get() and not all(map(_is_finite, tree_leaves(output))):
        _bad_output.note(module)


class _BadOutput:
    """Records the first module with a non-finite output since the last call of ``forget_bad_output``."""

    def __init__(self) -> None:
        self.where: str | None = None
        self._told = False

    def note(self, module: torch.nn.Module) -> None:
        """Record a module whose output is not finite, and log the first such module of the process."""
        path = _WRAPPERS.sub("", _names.get(module, "")) or "the model"
        self.where = f"{path} ({type(module).__name__})"
        if not self._told:
            self._told = True
            rank = dist.get_rank() if dist.is_initialized() else 0
            logger.warning("rank %d: the first non-finite output comes from %s", rank, self.where)


_bad_output = _BadOutput()
_WRAPPERS = re.compile(r"^(module(\.|$))+")  # what Megatron wraps a model in: precision, data parallelism


def first_bad_output() -> str | None:
    """Return the path and class of the first module with a non-finite output, or None."""
    return _bad_output.where


def forget_bad_output() -> None:
    """Forget the recorded module, at the start of each step."""
    _bad_output.where = None


def _is_finite(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    return bool(torch.isfinite(value).all())


@functools.cache
def follow_modules() -> None:
    """Track which module is running, for ``current_layer``, with hooks on every module in verify mode."""
    torch.nn.modules.module.register_module_forward_pre_hook(_enter)
    torch.nn.modules.module.register_module_forward_hook(_leave, always_call=True)


if settings.VERIFY.get():
    follow_modules()  # before the first model runs, so that its first call has a name too
