"""Replace parts of a Transformers model or a custom model with this project's operations, and undo the
replacements.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType

from torch import nn

from megatron_npu.ops.swapping import (
    activations,
    attention,
    heads,
    linears,
    losses,
    norms,
    own_attention,
    rotary,
)
from megatron_npu.ops.swapping.found import Found, Left, Replacement

__all__ = ["Entry", "Swapped", "swap"]

_RECOGNISERS: tuple[Callable[[nn.Module], Found], ...] = (
    norms.recognise,
    activations.recognise,
    activations.recognise_gated,
    own_attention.recognise,
    rotary.recognise,
    losses.recognise,
    linears.recognise,
)

_CALLS_LEFT: dict[str, Mapping[nn.Module, str]] = {
    "attention": attention.calls_left,
    "output layer": heads.calls_left,
}


@dataclass(frozen=True)
class Entry:
    """What ``swap`` has done with one part of a model, and the reason.

    Attributes:
        where: the path of the part in the model; empty for the model itself.
        what: norm, attention, activation, gated MLP, rotary, loss, output layer, linear or dropout.
        by: the operation that replaced the part; empty if the part was kept.
        why_not: the reason why the part was kept; empty if it was replaced.
    """

    where: str
    what: str
    by: str = ""
    why_not: str = ""


@dataclass
class Swapped:
    """The result of calling ``swap`` for a model."""

    model: weakref.ReferenceType[nn.Module]
    entries: list[Entry] = field(default_factory=list)
    _undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def ledger(self) -> list[Entry]:
        """Return one entry per part of the model, including reasons that calls of the model have recorded
        since then.
        """
        model = self.model()
        modules = {} if model is None else dict(model.named_modules())
        found = []
        for entry in self.entries:
            left = _CALLS_LEFT.get(entry.what, {}).get(modules.get(entry.where, nn.Identity()), "")
            found.append(Entry(entry.where, entry.what, "", left) if left else entry)
        return found

    def lines(self) -> list[str]:
        """Return the entries as readable lines of text.

        The same part of all layers is on one line.
        """
        counted: Counter[tuple[str, str, str, str]] = Counter()
        for entry in self.ledger:
            pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", entry.where) or "the model"
            counted[pattern, entry.what, entry.by, entry.why_not] += 1
        return [
            f"{what} {where}" + (f" ({count})" if count > 1 else "") + (f": {by}" if by else f" stays: {why}")
            for (where, what, by, why), count in counted.items()
        ]

    def undo(self) -> None:
        """Undo all changes that ``swap`` made to the model.

        A second call has no effect.
        """
        while self._undo:
            self._undo.pop()()
        self.entries.clear()
        model = self.model()
        if model is not None:
            _swapped.pop(model, None)


_swapped: weakref.WeakKeyDictionary[nn.Module, Swapped] = weakref.WeakKeyDictionary()


def swap(model: nn.Module) -> Swapped:
    """Replace parts of ``model`` with this project's operations in place, and return the outcome.

    Modules are recognized by their structure and their results, not by model names. Each module keeps its
    parameters, their names, its hooks and its class. Modules that look replaceable but are not are listed in
    the ledger with the reason. Under ``torch.compile``, whatever the compiler fuses itself (norms,
    activations, rotary embeddings) is not replaced; for dropout, only the random draw is ours.

    Args:
        model: a Transformers model or your own, on any device, in any dtype, with its weights loaded. The
            operations run where the model is on this process's device.

    Returns:
        The ledger, and ``undo``. For a model that has already been swapped, the same object as before.
    """
    if model in _swapped:
        return _swapped[model]
    swapped = Swapped(weakref.ref(model))
    _swapped[model] = swapped
    for path, module in list(model.named_modules()):
        _swap_module(path, module, swapped)
    _swap_registered_attention(model, swapped)
    return swapped


def _swap_module(path: str, module: nn.Module, swapped: Swapped) -> None:
    loss = losses.loss_function_of(module)
    if isinstance(loss, str):
        swapped.entries.append(Entry(path, "loss", why_not=loss))
    elif loss is not None:
        _set(module, "_loss_function", loss, swapped)
        swapped.entries.append(Entry(path, "loss", "cross_entropy"))
    if callable(loss) or losses.is_ours(module):
        below, head = heads.recognise(module)
        _take(f"{path}.{below}".strip("."), module.get_submodule(below), head, swapped)
    if not heads.has_taken(module):
        for recognise in _RECOGNISERS:
            _take(path, module, recognise(module), swapped)


def _take(path: str, module: nn.Module, found: Found, swapped: Swapped) -> None:
    """Apply the replacement that was found for a module, and record the outcome."""
    if isinstance(found, Left):
        swapped.entries.append(Entry(path, found.what, why_not=found.why))
    elif isinstance(found, Replacement) and "forward" in vars(module):
        swapped.entries.append(Entry(path, found.what, why_not="its forward has been replaced already"))
    elif isinstance(found, Replacement):
        for name, value in (("forward", MethodType(found.forward, module)), *found.notes.items()):
            _set(module, name, value, swapped)
        swapped.entries.append(Entry(path, found.what, found.by))


def _set(module: nn.Module, name: str, value: object, swapped: Swapped) -> None:
    """Set an attribute on the module instance, and record how to undo it."""
    attributes = vars(module)
    if name in attributes:
        before = attributes[name]
        swapped._undo.append(lambda: attributes.__setitem__(name, before))
    else:
        swapped._undo.append(lambda: attributes.pop(name, None))
    attributes[name] = value


def _swap_registered_attention(model: nn.Module, swapped: Swapped) -> None:
    """Select our attention in the model's configs, and record each layer that uses it."""
    refused = []
    for path, outcome in attention.choose_in_configs(model):
        if isinstance(outcome, str):
            refused.append(path)
            swapped.entries.append(Entry(path, "attention", why_not=outcome))
        else:
            swapped._undo.append(outcome)
    for path, module in model.named_modules():
        inside = any(path == root or path.startswith(f"{root}.") or not root for root in refused)
        if attention.asks_the_registry(module) and not inside:
            swapped.entries.append(Entry(path, "attention", "attention"))
