"""Replace uses of TransformerEngine outside the layer specs.

Patches ``extensions.transformer_engine``, ``fp8_utils``, ``tensor_parallel.inference_layers``,
``transformer.multi_latent_attention`` and ``utils:get_te_version`` of ``megatron.core``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packaging.version import Version

from megatron_npu.adaptors.megatron_core.decorators import (
    NOT_FIXED,
    around,
    constant,
    replace,
    te_layers_present,
)
from megatron_npu.adaptors.megatron_core.layers.norm import Norm
from megatron_npu.adaptors.megatron_core.te import redirect


@replace(
    "megatron.core.extensions.transformer_engine:TENorm",
    versions=">=0.13",
    condition=te_layers_present,
    why=(
        "without TransformerEngine the name raises an ImportError or is a mock; image models use the name"
        " directly"
    ),
)
class TENorm:
    """Factory that creates the norm of the local layers and logs this.

    Like upstream's class, it has no instances.

    Whether a residual follows (since 0.17) does not matter, because the local norm does not add it.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, has_residual: bool = False) -> Any:
        redirect.report("TENorm()")
        return Norm(config, hidden_size, eps)


constant(
    "megatron.core.transformer.multi_latent_attention:HAVE_TE",
    False,
    versions=">=0.14,<0.17",
    condition=te_layers_present,
    upstream_bug=True,
    until="0.17, which checks the wrapper",
    why=(
        "upstream considers TransformerEngine installed because its own wrapper can be imported without "
        "it, and then checks whether a layer is an instance of None, which raises a TypeError"
    ),
)


@replace(
    "megatron.core.utils:get_te_version",
    versions="<0.17",
    condition=te_layers_present,
    upstream_bug=True,
    until="0.17, which returns 0.0.0",
    why=(
        "0.12 imports TransformerEngine for the answer, and 0.13 to 0.16 return None, which cannot be "
        "compared: loading a checkpoint and the check of --rotary-interleaved call this function"
    ),
)
def get_te_version() -> Version:
    """Return version 0, which is older than every version that upstream requires."""
    return Version("0")


@replace(
    "megatron.core.tensor_parallel.inference_layers:is_inference_column_parallel_linear",
    versions=">=0.20",
    condition=te_layers_present,
    upstream_bug=True,
    until=NOT_FIXED,
    why=(
        "without TransformerEngine the layers that upstream compares with are mocks: --mtp-num-layers "
        "raises a TypeError"
    ),
)
def is_never_for_inference(module: Any) -> bool:
    """Return False, because inference layers are built from TransformerEngine's layers."""
    return False


@around(
    "megatron.core.fp8_utils:_quantize_param_shard_impl",
    versions="<0.13",
    upstream_bug=True,
    until="0.13, which returns immediately itself",
    why="without TransformerEngine 0.12's version raises an error in every step of the distributed "
    "optimizer, which has no fp8 parameters to pass",
)
def skip_without_parameters(
    original: Callable[..., Any], model_params: list[Any], *args: Any, **kwargs: Any
) -> Any:
    """Return immediately if the optimizer has no parameters, and otherwise call upstream's function."""
    return original(model_params, *args, **kwargs) if model_params else None
