"""Provide layer specs for GPT, its experts and multi-token prediction.

Patches ``models.gpt.gpt_layer_specs``, ``models.gpt.heterogeneous.heterogeneous_layer_specs``,
``models.gpt.moe_module_specs`` and ``transformer.multi_token_prediction`` of ``megatron.core``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around, te_layers_present
from megatron_npu.adaptors.megatron_core.options.script_arguments import script_arguments
from megatron_npu.adaptors.megatron_core.te.redirect import force_flag_off, redirect_to_local

_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_NAME_ERROR = "without TransformerEngine the function raises a NameError"

# Asked for RMSNorm, the local spec takes the norm that goes by the config, as TransformerEngine's does.
# Not asked, it takes apex's where that is installed, which knows layer norm alone.
_local_layer = redirect_to_local("get_gpt_layer_local_spec", normalization="RMSNorm")

_local_submodules = redirect_to_local("get_gpt_layer_local_submodules", normalization="RMSNorm")

around(
    f"{_SPECS}:get_gpt_layer_with_transformer_engine_spec",
    versions="<0.17",
    condition=te_layers_present,
    why=_NAME_ERROR,
)(_local_layer)
around(
    f"{_SPECS}:get_gpt_layer_with_transformer_engine_submodules",
    versions=">=0.17",  # the spec calls it
    condition=te_layers_present,
    why="without TransformerEngine the layers are built from a mock",
)(_local_submodules)

_WHY_INFERENCE = "the function asserts that its layers are TransformerEngine's"
around(
    f"{_SPECS}:get_gpt_layer_with_inference_spec",
    versions=">=0.16,<0.17",
    condition=te_layers_present,
    why=_WHY_INFERENCE,
)(_local_layer)
around(
    f"{_SPECS}:get_gpt_layer_with_inference_submodules",
    versions=">=0.17",
    condition=te_layers_present,
    why=_WHY_INFERENCE,
)(_local_submodules)

around(
    f"{_SPECS}:get_mlp_module_spec",
    versions="<0.17",  # which asks the provider, as the next ones do
    condition=te_layers_present,
    why=_NAME_ERROR,
)(force_flag_off("use_te"))

around(
    f"{_SPECS}:get_gpt_decoder_layer_specs",
    versions=">=0.16,<0.17",
    condition=te_layers_present,
    why=_NAME_ERROR,
)(force_flag_off("use_transformer_engine"))

for _name in ("get_gpt_decoder_block_spec", "get_gpt_mtp_block_spec"):
    around(f"{_SPECS}:{_name}", versions="<0.17", condition=te_layers_present, why=_NAME_ERROR)(
        force_flag_off("use_transformer_engine")
    )

around(
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs:get_gpt_heterogeneous_layer_spec",
    condition=te_layers_present,
    why="the layers are None if TransformerEngine is requested but not installed",
)(force_flag_off("use_te"))

around(
    "megatron.core.models.gpt.moe_module_specs:get_moe_module_spec",
    versions="<0.17",
    condition=te_layers_present,
    why=(
        "the default is TransformerEngine; without it, the function raises a NameError in 0.12 and builds"
        " layers from a mock since then"
    ),
)(force_flag_off("use_te"))

around(
    "megatron.core.transformer.multi_token_prediction:get_mtp_layer_spec",
    versions="<0.17",
    condition=te_layers_present,
    why=(
        "the function raises an AssertionError or a NameError if TransformerEngine is requested but not "
        "installed"
    ),
)(force_flag_off("use_transformer_engine"))


_with_qk_l2_norm = partial(
    around,
    upstream_bug=True,
    until=NOT_FIXED,
    why=(
        "stock pretrain_gpt.py does not pass --qk-l2-norm to the local spec, so the flag is silently ignored"
    ),
)


@_with_qk_l2_norm(f"{_SPECS}:get_gpt_layer_local_spec", versions=">=0.13,<0.17")
@_with_qk_l2_norm(f"{_SPECS}:get_gpt_layer_local_submodules", versions=">=0.17")
def with_qk_l2_norm(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Read the flag for L2 norm of queries and keys from the script's arguments if the caller does not
    pass the flag.
    """
    given = inspect.signature(original).bind(*args, **kwargs)
    if getattr(script_arguments(), "qk_l2_norm", False):
        given.arguments.setdefault("qk_l2_norm", True)
    return original(*given.args, **given.kwargs)
