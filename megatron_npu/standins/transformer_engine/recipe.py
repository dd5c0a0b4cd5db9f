"""Stub for ``transformer_engine.common.recipe``, in which all fp8 and fp4 recipes are rejected."""

from __future__ import annotations

import enum
from typing import Any, NoReturn

from megatron_npu.base.errors import UsageError


def refuse(asked: str) -> NoReturn:
    """Raise an error that this precision is not supported, with the reason.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"{asked} is not supported by the layers that megatron_npu provides under TransformerEngine's "
        "names; they support fp32, bf16 and fp16. Train in bf16; fp8 and fp4 require the kernels of the "
        "package transformer-engine, which requires CUDA."
    )


class Format(enum.Enum):
    """The names of the fp8 formats, for configurations that contain one."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    """A recipe, which cannot be instantiated.

    Raises:
        UsageError: always.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse(type(self).__name__)


class DelayedScaling(Recipe):
    """A recipe for fp8 with scales from earlier steps."""


class Float8CurrentScaling(Recipe):
    """A recipe for fp8 with one scale per tensor."""


class Float8BlockScaling(Recipe):
    """A recipe for fp8 with one scale per block."""


class MXFP8BlockScaling(Recipe):
    """A recipe for fp8 in the format of the Open Compute Project."""


class NVFP4BlockScaling(Recipe):
    """A recipe for fp4."""
