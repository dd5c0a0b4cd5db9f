"""Provide layers without TransformerEngine through upstream's interface for spec providers.

Patches ``extensions.transformer_engine_spec_provider``, ``models.gpt.gpt_layer_specs`` and
``transformer.multi_token_prediction`` of ``megatron.core``. A user's own spec can use it as a backend:
``get_mlp_module_spec_for_backend(MegatronNpuSpecProvider())``, with the class that ``spec_provider()``
returns.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import te_layers_present, wrap
from megatron_npu.adaptors.megatron_core.layers.norm import Norm
from megatron_npu.adaptors.megatron_core.te import redirect


@functools.cache
def spec_provider() -> type:
    """Return the class ``MegatronNpuSpecProvider``, which implements megatron-core's ``BackendSpecProvider``.

    Its modules are the local ones, which use our operations; it has no layers that fuse a norm with a matmul.
    Creating an instance logs that TransformerEngine is not installed.
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
    why="without TransformerEngine the layers that the provider returns are built from a mock",
)
@wrap(
    "megatron.core.models.gpt.gpt_layer_specs:TESpecProvider",
    versions=">=0.17",
    condition=te_layers_present,
    why="without TransformerEngine there is no provider: code that asks for its layers raises a TypeError",
)
@wrap(
    "megatron.core.transformer.multi_token_prediction:TESpecProvider",
    versions=">=0.17",
    condition=te_layers_present,
    why="without TransformerEngine there is no provider: code that asks for its layers raises a TypeError",
)
def provide_local_layers(original: type | None) -> type:
    """Return our spec provider, and log that it is used."""
    return spec_provider()


@wrap(
    "megatron.core.models.gpt.gpt_layer_specs:TENorm",
    versions=">=0.17",
    condition=te_layers_present,
    why="without TransformerEngine there is no such norm, and a block of its layers has no final norm",
)
def provide_norm(original: type | None) -> type:
    """Return the norm class that the config selects."""
    return Norm
