"""Define operations, each of which has one contract, one reference and one implementation per device.

``swap`` replaces parts of a model with these operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_npu.ops.swapping import Swapped as Swapped
    from megatron_npu.ops.swapping import swap as swap

__all__ = ["Swapped", "swap"]


def __getattr__(name: str) -> Any:
    """Import the ``swap`` function on first access, because most users of single operations do not need
    it.
    """
    if name in __all__:
        from megatron_npu.ops import swapping

        return getattr(swapping, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
