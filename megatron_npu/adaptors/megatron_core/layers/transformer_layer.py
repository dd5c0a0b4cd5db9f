"""On an NPU, fuse a layer's biases into its matmuls, and its residual additions into the next norms.

This applies to transformer blocks, multi-token prediction layers, and hybrids of attention and state space
models.

Patches ``transformer.transformer_block``, ``transformer.multi_token_prediction``, ``ssm.mamba_block``,
``models.hybrid.hybrid_block`` and ``tensor_parallel.layers``.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import around, records
from megatron_npu.adaptors.shared.decorators import upstream_compiles
from megatron_npu.adaptors.shared.layers import biased_product, residual_norms
from megatron_npu.standins.transformer_engine import pytorch as te_layers

biased_product.connect(records, lambda bias: None)

Add = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


_in_layers = partial(around, devices=("npu", "cuda"), condition=upstream_compiles, why=residual_norms.WHY)


@_in_layers("megatron.core.transformer.transformer_block:TransformerBlock._build_layers", order=1)
def of_a_block(original: Callable[[Any], None], self: Any) -> None:
    """Fuse biases into matmuls, and residual additions into norms, in and between the layers of a block."""
    original(self)
    _connect(self.layers, self.final_layernorm, self.config)


@_in_layers("megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock._build_layers")
def of_predictions(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Fuse biases and residual additions in the layers for multi-token prediction."""
    original(self, *args, **kwargs)
    for each in self.layers:
        inner = getattr(each, "mtp_model_layer", None) or each.transformer_layer
        _connect(getattr(inner, "layers", [inner]), each.final_layernorm, self.config)


@_in_layers("megatron.core.ssm.mamba_block:MambaStack.__init__", versions="<0.18")
@_in_layers("megatron.core.models.hybrid.hybrid_block:HybridStack.__init__", versions=">=0.18")
def of_a_hybrid(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Fuse biases and residual additions in layers of hybrid models, which contain attention, an MLP or a
    state-space model.
    """
    original(self, *args, **kwargs)
    _connect(self.layers, getattr(self, "final_norm", None), self.config)


def _connect(layers: Iterable[Any], final: Any, config: Any) -> None:
    """Make matmuls add the biases of the layers, and register the norm that reads each residual sum.

    Args:
        layers: consecutive layers, which add their residuals themselves.
        final: the norm after the last layer, or None.
        config: the configuration of all layers.
    """
    layers = list(layers)
    if devices.current().name == "npu":  # elsewhere the kernel that reads a product adds its bias
        for layer in layers:
            biased_product.let_layers_add(layer)
            _let_products_add_biases(layer)
    again = not residual_norms.without_recomputation(None, config.recompute_modules)
    if not again and not _moves_inputs_of_norms(config):
        _tell_norms(layers, final, config)


def _tell_norms(layers: list[Any], final: Any, config: Any) -> None:
    """Register the norm that reads the output of each part of a layer, for parts that can also compute
    that norm.
    """
    apart = not residual_norms.without_recomputation(config.recompute_granularity)  # recomputed one by one
    mlp_again = "mlp" in (config.recompute_modules or ())
    parts = [part for layer in layers for part in _parts(layer, mlp_again)]
    for part, behind in pairwise([*parts, _Part(None, "", final, True)]):
        if part.own and (part.layer is behind.layer or not apart):
            _tell(part.layer, part.adds, behind.norm, here=part.layer is behind.layer)


class _Part(NamedTuple):
    """A part of a layer that adds to the residual: attention, an MLP or a state-space model.

    Attributes:
        layer: the layer that the part belongs to.
        adds: the name of the layer's attribute that performs the addition.
        norm: the norm that reads the sum of the previous part.
        own: whether the next part directly reads what this part adds.
    """

    layer: Any
    adds: str
    norm: Any
    own: bool


def _parts(layer: Any, mlp_again: bool) -> Iterator[_Part]:
    """Yield the parts of a layer that add to the residual.

    ``mlp_again`` is True if MLPs are recomputed.
    """
    if hasattr(layer, "mamba_bda"):
        yield _Part(layer, "mamba_bda", _norm_of(layer, "norm", "mixer.in_proj"), True)
        return
    alone = _passes_on(layer, "cross_attention") and _passes_on(layer, "pre_cross_attn_layernorm")
    if not _passes_on(layer, "self_attention"):
        norm = _norm_of(layer, "input_layernorm", "self_attention.linear_qkv")
        yield _Part(layer, "self_attn_bda", norm, alone)
    if not _passes_on(layer, "mlp"):
        norm = _norm_of(layer, "pre_mlp_layernorm", "mlp.linear_fc1", mlp_again)
        yield _Part(layer, "mlp_bda", norm, True)


def _moves_inputs_of_norms(config: Any) -> bool:
    """Return True if the inputs of norms are offloaded (possible since 0.16).

    Fused residual sums would prevent this.
    """
    moved = getattr(config, "offload_modules", None) or ()
    asked = getattr(config, "fine_grained_activation_offloading", False)
    return asked and not {"attn_norm", "mlp_norm"}.isdisjoint(moved)


def _passes_on(layer: Any, part: str) -> bool:
    """Return True if the submodule ``part`` of a layer is merely an identity."""
    return type(getattr(layer, part, None)).__name__ == "IdentityOp"


def _norm_of(layer: Any, part: str, linear: str, recomputed: bool = False) -> Any:
    """Return the norm with the attribute name ``part`` in a layer.

    With TransformerEngine's names, the layer ``linear`` includes the norm.

    Args:
        recomputed: whether ``linear`` is recomputed; if so, it reads a copy of the sum.
    """
    if _passes_on(layer, part) and not recomputed:
        with contextlib.suppress(AttributeError):
            return operator.attrgetter(linear)(layer)
    return getattr(layer, part, None)


def _let_products_add_biases(layer: Any) -> None:
    """Make each layer that replaces one of TransformerEngine's linear layers add its own bias, except in
    experts.

    Callers of experts first scale the second layer's bias by the router's probability.
    """
    experts = getattr(getattr(layer, "mlp", None), "experts", None)
    left = set() if experts is None else set(experts.modules())
    for module in layer.modules():
        if isinstance(module, te_layers.Linear) and module not in left:
            module.take_bias()


def _tell(layer: Any, where: str, norm: Any, *, here: bool) -> None:
    """Make the residual addition called ``where`` in a layer also compute ``norm``.

    The addition must be upstream's function, and the norm ours.

    Args:
        here: whether this layer also contains the norm.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    known = (WrappedTorchNorm, te_layers.RMSNorm, te_layers.LayerNormLinear)
    own = getattr(layer, where, None) is get_bias_dropout_add and isinstance(norm, known)
    if own and residual_norms.reads_sums(norm):
        setattr(layer, where, _SumForNorm(norm, here))


class _SumForNorm:
    """Replacement for ``get_bias_dropout_add`` in one residual addition of a layer.

    Args:
        norm: the norm that will read the sum.
        here: whether the norm belongs to the layer that adds; the weights of another layer may not be
            gathered yet.
    """

    def __init__(self, norm: Any, here: bool) -> None:
        self.norm, self.here = norm, here

    def __call__(self, training: bool, fused: bool) -> Add:
        """Return the function that adds the residual and, if possible, also computes the norm.

        In inference or without --bias-dropout-fusion, it is upstream's own.
        """
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

        plain: Add = get_bias_dropout_add(training, fused)
        if not (training and fused):
            return plain

        def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
            there = self.here or not residual_norms.is_shared_out(self.norm)
            total = residual_norms.add(*x_with_bias, residual, prob, self.norm) if there else None
            return plain(x_with_bias, residual, prob) if total is None else total

        return add
