"""``megatron.core.extensions.transformer_engine_spec_provider``: which layers a spec is made of."""

from __future__ import annotations

from typing import Any

from megatron_npu.adaptors.megatron_core import te_fallback
from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap


@wrap(
    "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider",
    versions=">=0.13",
    condition=transformer_engine_present,
    why="without TransformerEngine the layers that it provides are made of a mock",
)
def provide_local_layers(original: type) -> type:
    """Return a provider of local layers that says so."""
    from megatron.core.models.backends import LocalSpecProvider

    class TESpecProvider(LocalSpecProvider):
        def __init__(self) -> None:
            te_fallback.report("TESpecProvider()")

        def linear(self) -> Any:
            return self.column_parallel_linear()

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> Any:
            # The norm that goes by the config; see adaptor_models_gpt_gpt_layer_specs.
            return super().layer_norm(rms_norm=True, for_qk=for_qk)

    return TESpecProvider
