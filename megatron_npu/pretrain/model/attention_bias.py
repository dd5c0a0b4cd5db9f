"""Add a bias only to the output projection of attention.

megatron-core has no flag for this.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear


class BiasedProjection(RowParallelLinear):
    """Linear layer with a bias that does not depend on ``config.add_bias_linear``."""

    def __init__(self, *args: Any, bias: bool = True, **options: Any) -> None:
        super().__init__(*args, bias=True, **options)


def add(layers: Any) -> None:
    """Add a bias to the attention's output projection in all layers of a spec.

    Args:
        layers: the spec, either for all layers or with one entry per layer.
    """
    for layer in getattr(layers, "layer_specs", [layers]):
        attention = layer.submodules.self_attention.submodules
        if attention.linear_proj is not BiasedProjection and attention.linear_proj is not RowParallelLinear:
            raise AssertionError(
                f"the attention must end in RowParallelLinear, but ends in {attention.linear_proj}"
            )
        attention.linear_proj = BiasedProjection
