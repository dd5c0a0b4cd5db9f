"""Replace activation functions and gated MLPs, which are recognized by the values that they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_npu.ops.activation import bias_gelu, geglu, gelu, swiglu
from megatron_npu.ops.swapping.found import (
    Found,
    Left,
    Replacement,
    agrees,
    bound_elsewhere,
    has_forward_of,
    is_leaf,
    own_forward,
)

# Where activation functions are at home; any other leaf without weights may be anything.
_HOMES = ("torch.nn.modules.activation", "transformers.activations")
_CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def recognise(module: nn.Module) -> Found:
    """Return our replacement for a module that is an activation function."""
    if (
        type(module).__module__ not in _HOMES
        or not is_leaf(module)
        or next(module.parameters(), None) is not None
    ):
        return None
    curve = curve_of(module)
    if curve == "gelu":
        return Replacement("activation", "gelu", _exact)
    if curve == "gelu_tanh":
        return Replacement("activation", "bias_gelu (tanh form)", _tanh)
    if curve == "silu" or isinstance(module, (nn.MultiheadAttention, nn.Softmax)):
        return None  # one kernel of torch's as it is
    return Left("activation", f"{type(module).__name__} is neither form of GELU") if _wavy(module) else None


def curve_of(module: nn.Module) -> str | None:
    """Return the name of an activation function (``gelu``, ``gelu_tanh`` or ``silu``), recognized by its
    values on -6 to 6.
    """
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)
    try:
        with torch.no_grad():
            y = module(x)
    except Exception:  # not a function of one tensor
        return None
    # the two forms of GELU are 1e-3 apart; NewGELU of Transformers is the tanh form to 1e-15
    return next((name for name, curve in _CURVES.items() if agrees(y, curve(x), 1e-9)), None)


def _wavy(module: nn.Module) -> bool:
    """Return True if the class name of a module contains GELU, although it computes neither form of GELU."""
    return "gelu" in type(module).__name__.lower()


def _exact(module: Any, input: Tensor) -> Tensor:
    return own_forward(module, input) if bound_elsewhere(input) else gelu(input)


def _tanh(module: Any, input: Tensor) -> Tensor:
    return own_forward(module, input) if bound_elsewhere(input) else bias_gelu(input)


def recognise_gated(module: Any) -> Found:
    """Return the replacement for an MLP that computes ``down(curve(gate(x)) * up(x))``, with any
    attribute names.
    """
    parts = _gated_parts(module)
    if parts is None:
        return None
    gate, up, down, curve = parts
    if curve not in ("silu", "gelu_tanh"):
        return Left("gated MLP", f"there is no operation for its activation function ({curve or 'unknown'})")
    weight = module.get_submodule(gate).weight
    if weight.device.type == "meta":
        return Left("gated MLP", "its weights are not initialized yet (meta device)")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, weight.size(1), generator=generator).to(weight.device, weight.dtype)
    was_training = module.training
    try:
        with torch.no_grad():
            actual = module.eval()(x)
    except Exception as error:  # it takes something else, too
        return Left("gated MLP", f"the module cannot be called with [n, h] alone ({type(error).__name__})")
    finally:
        module.train(was_training)
    for first, second in ((gate, up), (up, gate)):
        with torch.no_grad():
            names = (first, second, down)
            a, b, out = (module.get_submodule(name) for name in names)
            expected = out(_CURVES[curve](a(x)) * b(x))
        if agrees(actual, expected, 1e-5 if weight.dtype is torch.float32 else 3e-2):
            operation = "swiglu" if curve == "silu" else "geglu"
            return Replacement("gated MLP", operation, _gated, {"_swapped_parts": (*names, curve)})
    return Left("gated MLP", "its parts are combined in a different way")


def _gated_parts(module: Any) -> tuple[str, str, str, str | None] | None:
    """Return the names of an MLP's two parallel layers, of its last layer and of its activation function,
    or None.
    """
    linears = {name: child for name, child in module.named_children() if has_forward_of(child, nn.Linear)}
    others = [child for name, child in module.named_children() if name not in linears]
    functions = [child for child in others if not isinstance(child, nn.Dropout)]
    if len(linears) != 3 or len(functions) != 1 or not is_leaf(functions[0]):
        return None
    for down in linears:
        first, second = (name for name in linears if name != down)
        if _leads_back(linears, first, second, down):
            return first, second, down, curve_of(functions[0])
    return None


def _leads_back(linears: dict[str, Any], first: str, second: str, down: str) -> bool:
    """Return True if the layer ``down`` maps the output of the two parallel layers back to their input size.

    Among square layers, ``down`` is the last one.
    """
    shape, beside, back = (linears[name].weight.shape for name in (first, second, down))
    return shape == beside == back[::-1] and (shape != back or down == list(linears)[-1])


def _gated(module: Any, x: Tensor) -> Tensor:
    if bound_elsewhere(x):
        return own_forward(module, x)
    gate, up, down, curve = module._swapped_parts
    halves = torch.cat((getattr(module, gate)(x), getattr(module, up)(x)), -1)
    inner = swiglu(halves) if curve == "silu" else geglu(halves)
    for child in _dropouts(module):
        inner = child(inner)
    return getattr(module, down)(inner)


def _dropouts(module: nn.Module) -> Iterator[nn.Module]:
    return (child for child in module.children() if isinstance(child, nn.Dropout))
