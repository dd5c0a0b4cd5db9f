"""Stub for ``transformer_engine.common.recipe``, which rejects all fp8 and fp4 recipes."""

from __future__ import annotations

import enum
from typing import Any, NoReturn

from megatron_npu.base.errors import UsageError


def refuse(asked: str) -> NoReturn:
    """Raise an error that states why a low precision is not supported.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"{asked} is not supported by the layers that megatron_npu provides under TransformerEngine's "
        "names; they support fp32, bf16 and fp16. Train in bf16; fp8 and fp4 require the kernels of the "
        "package transformer-engine, which requires CUDA."
    )


class Format(enum.Enum):
    """The names of the fp8 formats, for configurations that contain one of them."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    """Base class of the recipes, which cannot be instantiated.

    Raises:
        UsageError: always.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse(type(self).__name__)


class DelayedScaling(Recipe):
    """The recipe for fp8 with scales from earlier steps."""


class Float8CurrentScaling(Recipe):
    """The recipe for fp8 with one scale per tensor."""


class Float8BlockScaling(Recipe):
    """The recipe for fp8 with one scale per block."""


class MXFP8BlockScaling(Recipe):
    """The recipe for fp8 in the format of the Open Compute Project."""


class NVFP4BlockScaling(Recipe):
    """The recipe for fp4."""
