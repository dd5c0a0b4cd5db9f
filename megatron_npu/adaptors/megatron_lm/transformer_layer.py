"""On an NPU, fuse a layer's biases into its matmuls, and its residual additions into the next norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import around, records
from megatron_npu.adaptors.shared.layers import biased_product, fusions, residual_norms

_TRANSFORMER = "megatron.model.transformer"
_NORMS = "megatron_npu_norms"  # of a layer: those that read its sums, in the order in which it adds

biased_product.connect(records, fusions.no_bias)  # upstream expands what it is handed as a bias


@around(f"{_TRANSFORMER}:ParallelTransformer.__init__", devices=("npu",), why=residual_norms.WHY, order=1)
def tell_layers_their_norms(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Store in each layer the norms that read its residual sums.

    The norms are the layer's own norms, and the next layer's norm or the final norm.
    """
    original(self, *args, **kwargs)
    layers = list(self.layers)
    for layer in layers:
        biased_product.let_layers_add(layer)
    after = [getattr(layer, "input_layernorm", None) for layer in layers[1:]]
    after.append(getattr(self, "final_layernorm", None))
    for layer, last in zip(layers, after, strict=True):
        if not hasattr(layer, "post_attention_layernorm"):  # upstream's layer that does nothing
            continue
        norms = [layer.post_attention_layernorm]
        if layer.layer_type.name == "decoder":
            norms.append(layer.post_inter_attention_layernorm)
        norms.append(last if residual_norms.without_recomputation(self.recompute_granularity) else None)
        setattr(layer, _NORMS, tuple(norm if residual_norms.reads_sums(norm) else None for norm in norms))


@around(f"{_TRANSFORMER}:ParallelTransformerLayer.forward", devices=("npu",), why=residual_norms.WHY)
def forward(original: Callable[..., Tensor], self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run the layer on ``[s, b, h]``, with residual additions that also compute the layer's norms."""
    with residual_norms.read_by(getattr(self, _NORMS, ()) if self.training else ()):
        return original(self, *args, **kwargs)
