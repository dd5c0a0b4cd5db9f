"""Stub for ``transformer_engine.pytorch.tensor``, with the classes that upstream uses to check parameters."""

from __future__ import annotations

from typing import Any

from megatron_npu.standins.transformer_engine.recipe import refuse


class QuantizedTensor:
    """Class of quantized tensors, which has no instances.

    Raises:
        UsageError: an instance is created.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse("QuantizedTensor")
