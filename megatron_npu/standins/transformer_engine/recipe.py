"""``transformer_engine.common.recipe``: recipes of fp8 and fp4, each of which is refused."""

from __future__ import annotations

import enum
from typing import Any, NoReturn

from megatron_npu.base.errors import UsageError


def refuse(asked: str) -> NoReturn:
    """Say why there is no such precision.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"{asked} with the layers of megatron_npu under TransformerEngine's names",
        "a precision that they have: fp32, bf16 or fp16",
        "Train in bf16; fp8 and fp4 are kernels of the package transformer-engine, which needs CUDA.",
    )


class Format(enum.Enum):
    """The names of fp8's formats, for configurations that hold one."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    """A recipe; none can be made.

    Raises:
        UsageError: always.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse(type(self).__name__)


class DelayedScaling(Recipe):
    """fp8, scales of earlier steps."""


class Float8CurrentScaling(Recipe):
    """fp8, a scale for each tensor."""


class Float8BlockScaling(Recipe):
    """fp8, a scale for each block."""


class MXFP8BlockScaling(Recipe):
    """fp8 in the format of the Open Compute Project."""


class NVFP4BlockScaling(Recipe):
    """fp4."""
