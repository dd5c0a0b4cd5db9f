"""Layers without TransformerEngine through upstream's own interface, a provider of the spec's modules.

Connects ``extensions.transformer_engine_spec_provider``, ``models.gpt.gpt_layer_specs`` and
``transformer.multi_token_prediction`` of ``megatron.core``. A spec of one's own takes it as a backend:
``get_mlp_module_spec_for_backend(MegatronNpuSpecProvider())``, with what ``spec_provider()`` returns.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import te_layers_present, wrap
from megatron_npu.adaptors.megatron_core.layers.norm import Norm
from megatron_npu.adaptors.megatron_core.te import redirect


@functools.cache
def spec_provider() -> type:
    """Return ``MegatronNpuSpecProvider``, a ``BackendSpecProvider`` of the megatron-core that is imported.

    Its modules are the local ones, which run our operations; of layers that fuse a norm with a product there
    are none. Whoever makes one is told that TransformerEngine is not there.
    """
    from megatron.core.models.backends import LocalSpecProvider

    class MegatronNpuSpecProvider(LocalSpecProvider):
        def __init__(self) -> None:
            redirect.report("TESpecProvider()")

        def linear(self) -> Any:
            return self.column_parallel_linear()

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
            # Of either kind by the config. That a residual follows is of no account: it is not added here.
            return Norm

    MegatronNpuSpecProvider.__module__ = __name__
    return MegatronNpuSpecProvider


@wrap(
    "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider",
    versions=">=0.13",
    condition=te_layers_present,
    why="without TransformerEngine the layers that it provides are made of a mock",
)
@wrap(
    "megatron.core.models.gpt.gpt_layer_specs:TESpecProvider",
    versions=">=0.17",
    condition=te_layers_present,
    why="without TransformerEngine there is none: what asks for its layers ends in a TypeError",
)
@wrap(
    "megatron.core.transformer.multi_token_prediction:TESpecProvider",
    versions=">=0.17",
    condition=te_layers_present,
    why="without TransformerEngine there is none: what asks for its layers ends in a TypeError",
)
def provide_local_layers(original: type | None) -> type:
    """Return our provider, and log it."""
    return spec_provider()


@wrap(
    "megatron.core.models.gpt.gpt_layer_specs:TENorm",
    versions=">=0.17",
    condition=te_layers_present,
    why="without TransformerEngine there is none, and a block of its layers ends without a norm",
)
def provide_norm(original: type | None) -> type:
    """Return the norm that the config selects."""
    return Norm
