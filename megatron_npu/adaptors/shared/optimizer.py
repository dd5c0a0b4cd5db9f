"""Patch the mixed-precision optimizers of both Megatrons to replace loops over parameters with single
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.shared.decorators import LAUNCHES_COUNTED
from megatron_npu.ops.optimizers.multi_tensor import CopiesTogether

WHY = "upstream copies or casts with one launch per parameter" + LAUNCHES_COUNTED


def copy_together(original: Callable[[Any], None], self: Any) -> None:
    """Collect the copies that a loop of upstream makes, and run them in one call.

    Gradients outside a buffer, which upstream frees one by one, are still handled by upstream.
    """
    groups = getattr(self, "float16_groups", ())  # of the optimizer that is not distributed
    if all(hasattr(parameter, "main_grad") for group in groups for parameter in group):
        with CopiesTogether():
            original(self)
    else:
        original(self)
