"""Layer specs of GPT, its experts and multi-token prediction."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.te_fallback.redirect import instead, named, without

_MODULE = "megatron.core.models.gpt.gpt_layer_specs"
_WHY = "without TransformerEngine it ends in a NameError"

# Asked for RMSNorm, the local spec takes the norm that goes by the config, as TransformerEngine's does.
# Without a word it takes apex's where that is installed, which knows layer norm alone.
_local = instead(named("get_gpt_layer_local_spec"), normalization="RMSNorm")
wrap(f"{_MODULE}:get_gpt_layer_with_transformer_engine_spec", condition=transformer_engine_present, why=_WHY)(
    _local
)
wrap(
    f"{_MODULE}:get_gpt_layer_with_inference_spec",
    versions=">=0.16",
    condition=transformer_engine_present,
    why="its layers are TransformerEngine's, and it asserts that",
)(_local)
wrap(f"{_MODULE}:get_mlp_module_spec", condition=transformer_engine_present, why=_WHY)(without("use_te"))
wrap(
    f"{_MODULE}:get_gpt_decoder_layer_specs",
    versions=">=0.16",
    condition=transformer_engine_present,
    why=_WHY,
)(without("use_transformer_engine"))
for _name in ("get_gpt_decoder_block_spec", "get_gpt_mtp_block_spec"):
    wrap(f"{_MODULE}:{_name}", condition=transformer_engine_present, why=_WHY)(
        without("use_transformer_engine")
    )


@wrap(
    f"{_MODULE}:get_gpt_layer_local_spec",
    versions=">=0.13",
    why="stock pretrain_gpt.py does not hand --qk-l2-norm to the local spec: it is ignored without a word",
)
def with_qk_l2_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Take the flag from the script's arguments where the caller is silent."""

    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_gpt_layer_local_spec(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if _flag_given():
            given.arguments.setdefault("qk_l2_norm", True)
        return original(*given.args, **given.kwargs)

    return get_gpt_layer_local_spec


def _flag_given() -> bool:
    script = sys.modules.get("megatron.training.global_vars")  # absent where megatron-core is a library
    return getattr(getattr(script, "_GLOBAL_ARGS", None), "qk_l2_norm", False)


wrap(
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs:get_gpt_heterogeneous_layer_spec",
    condition=transformer_engine_present,
    why="asked for TransformerEngine without it, its layers are None",
)(without("use_te"))


wrap(
    "megatron.core.models.gpt.moe_module_specs:get_moe_module_spec",
    condition=transformer_engine_present,
    why="its default is TransformerEngine: a NameError in 0.12, layers of a mock since",
)(without("use_te"))


wrap(
    "megatron.core.transformer.multi_token_prediction:get_mtp_layer_spec",
    condition=transformer_engine_present,
    why="asked for TransformerEngine without it, it ends in an AssertionError or a NameError",
)(without("use_transformer_engine"))
