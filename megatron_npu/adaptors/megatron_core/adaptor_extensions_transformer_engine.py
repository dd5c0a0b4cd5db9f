"""``megatron.core.extensions.transformer_engine``: its norm, which some models take by themselves."""

from __future__ import annotations

from typing import Any

from megatron_npu.adaptors.megatron_core import te_fallback
from megatron_npu.adaptors.megatron_core.decorators import replace, transformer_engine_present
from megatron_npu.adaptors.megatron_core.norm import Norm


@replace(
    "megatron.core.extensions.transformer_engine:TENorm",
    versions=">=0.13",
    condition=transformer_engine_present,
    why="without TransformerEngine it is an ImportError, or a mock: models for images name it as it is",
)
class TENorm:
    """Makes the norm of the local layers, and says so. As upstream's, its instances are another's."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        te_fallback.report("TENorm()")
        return Norm(config, hidden_size, eps)
