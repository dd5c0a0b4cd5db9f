"""``transformer_engine.pytorch.tensor``: what upstream asks whether a parameter is."""

from __future__ import annotations

from typing import Any

from megatron_npu.standins.transformer_engine.recipe import refuse


class QuantizedTensor:
    """No tensor is one.

    Raises:
        UsageError: one is to be made.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse("QuantizedTensor")
