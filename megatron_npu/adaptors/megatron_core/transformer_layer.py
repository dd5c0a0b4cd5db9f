"""A layer's biases in its products, and its residuals added with the norms that read them; on an NPU.

Connects ``transformer.transformer_block`` and ``tensor_parallel.layers``.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import around, records
from megatron_npu.adaptors.shared import biased_product, residual_norms
from megatron_npu.standins.transformer_engine import pytorch as te_layers

biased_product.connect(records, lambda bias: None)

Add = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


@around(
    "megatron.core.transformer.transformer_block:TransformerBlock._build_layers",
    devices=("npu",),
    why=residual_norms.WHY,
)
def tell_sums_their_norms(original: Callable[[Any], None], self: Any) -> None:
    """Give what adds a layer's residuals the norms that read the sums, the next layer's for the last."""
    original(self)
    for layer in self.layers:
        biased_product.let_layers_add(layer)
        _let_products_add_biases(layer)
    config = self.config
    if not residual_norms.without_recomputation(None, config.recompute_modules):
        return
    if _moves_inputs_of_norms(config):
        return
    layers = list(self.layers)
    for layer in layers:
        if _passes_on(layer, "cross_attention") and _passes_on(layer, "pre_cross_attn_layernorm"):
            recomputed = "mlp" in config.recompute_modules
            _tell(layer, "self_attn_bda", _norm_of(layer, "pre_mlp_layernorm", "mlp.linear_fc1", recomputed))
    if residual_norms.without_recomputation(config.recompute_granularity):
        after = [_norm_of(layer, "input_layernorm", "self_attention.linear_qkv") for layer in layers[1:]]
        for layer, norm in zip(layers, [*after, self.final_layernorm], strict=False):
            _tell(layer, "mlp_bda", norm)


def _moves_inputs_of_norms(config: Any) -> bool:
    """Return whether 0.16 or newer moves what a norm alone reads to the host; a sum has it with the norm."""
    moved = getattr(config, "offload_modules", None) or ()
    asked = getattr(config, "fine_grained_activation_offloading", False)
    return asked and not {"attn_norm", "mlp_norm"}.isdisjoint(moved)


def _passes_on(layer: Any, part: str) -> bool:
    """Return whether a layer has nothing in the place of ``part``."""
    return type(getattr(layer, part, None)).__name__ == "IdentityOp"


def _norm_of(layer: Any, part: str, linear: str, recomputed: bool = False) -> Any:
    """Return the norm ``part`` of a layer, or ``linear``, which has it under TransformerEngine's name.

    Args:
        recomputed: whether ``linear`` is, which then reads a copy of the sum.
    """
    if _passes_on(layer, part) and not recomputed:
        with contextlib.suppress(AttributeError):
            return operator.attrgetter(linear)(layer)
    return getattr(layer, part, None)


def _let_products_add_biases(layer: Any) -> None:
    """Let the linear layers under TransformerEngine's names do it, but those of experts.

    Their callers first scale the bias of the second by the router's probability.
    """
    experts = getattr(getattr(layer, "mlp", None), "experts", None)
    left = set() if experts is None else set(experts.modules())
    for module in layer.modules():
        if isinstance(module, te_layers.Linear) and module not in left:
            module.take_bias()


def _tell(layer: Any, where: str, norm: Any) -> None:
    """Let ``where`` of a layer, upstream's own function, add for ``norm``, if that is a norm of ours."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    known = (WrappedTorchNorm, te_layers.RMSNorm, te_layers.LayerNormLinear)
    own = getattr(layer, where, None) is get_bias_dropout_add and isinstance(norm, known)
    if own and residual_norms.reads_sums(norm):
        setattr(layer, where, _SumForNorm(norm))


class _SumForNorm:
    """In the place of ``get_bias_dropout_add``, for one place where a layer adds.

    Args:
        norm: that will read the sum.
    """

    def __init__(self, norm: Any) -> None:
        self.norm = norm

    def __call__(self, training: bool, fused: bool) -> Add:
        """Return the function that adds; upstream's own in inference and without --bias-dropout-fusion."""
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

        plain: Add = get_bias_dropout_add(training, fused)
        if not (training and fused):
            return plain

        def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
            total = residual_norms.add(*x_with_bias, residual, prob, self.norm)
            return plain(x_with_bias, residual, prob) if total is None else total

        return add
