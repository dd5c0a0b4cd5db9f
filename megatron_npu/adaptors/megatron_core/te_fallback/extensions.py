"""What is asked of TransformerEngine outside the specs: ``core.extensions``, ``core.fp8_utils``, ..."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from packaging.version import Version

from megatron_npu.adaptors.megatron_core.decorators import constant, replace, transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.norm import Norm
from megatron_npu.adaptors.megatron_core.te_fallback import redirect


@replace(
    "megatron.core.extensions.transformer_engine:TENorm",
    versions=">=0.13",
    condition=transformer_engine_present,
    why="without TransformerEngine it is an ImportError, or a mock: models for images name it as it is",
)
class TENorm:
    """Makes the norm of the local layers, and says so. As upstream's, its instances are another's."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        redirect.report("TENorm()")
        return Norm(config, hidden_size, eps)


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
            redirect.report("TESpecProvider()")

        def linear(self) -> Any:
            return self.column_parallel_linear()

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> Any:
            # The norm that goes by the config; see ``gpt``.
            return super().layer_norm(rms_norm=True, for_qk=for_qk)

    return TESpecProvider


constant(
    "megatron.core.transformer.multi_latent_attention:HAVE_TE",
    False,
    versions=">=0.14",
    condition=transformer_engine_present,
    why="upstream takes it for present because its own wrapper can be imported without it, and asks then "
    "whether a layer is an instance of None: TypeError",
)


@replace(
    "megatron.core.utils:get_te_version",
    condition=transformer_engine_present,
    why="0.12 imports TransformerEngine for the answer, 0.13 to 0.16 give None, which cannot be compared: "
    "loading a checkpoint asks, and the check of --rotary-interleaved",
)
def get_te_version() -> Version:
    """Return version 0, older than any that is asked for."""
    return Version("0")


@wrap(
    "megatron.core.fp8_utils:_quantize_param_shard_impl",
    versions="<0.13",
    why="without TransformerEngine 0.12's raises for every step of the distributed optimizer, which has no "
    "fp8 parameter to give it",
)
def nothing_to_quantize(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return at once when there is no parameter."""

    @functools.wraps(original)
    def quantize(model_params: list[Any], *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if model_params else None

    return quantize


logger = logging.getLogger(__name__)

_SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@wrap(
    "megatron.core.models.common.language_module.language_module:LanguageModule._set_attention_backend",
    condition=transformer_engine_present,
    why="it demands that NVTE_FLASH_ATTN and the like, which launch scripts export for TransformerEngine, "
    "are those of --attention-backend, and exports them: a second model with another backend is refused, too",
)
def leave_switches_alone(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Neither read nor export them: nobody asks without TransformerEngine. Say so where they are set."""

    @functools.wraps(original)
    def _set_attention_backend(self: Any) -> None:
        given = tuple(f"{name}={os.environ[name]}" for name in _SWITCHES if name in os.environ)
        if given:
            _say(" ".join(given))

    return _set_attention_backend


@functools.cache
def _say(given: str) -> None:
    logger.warning("%s: without TransformerEngine only --attention-backend chooses the attention", given)
