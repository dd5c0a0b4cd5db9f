"""``megatron.core.optimizer.cpu_offloading.hybrid_optimizer``: --optimizer-cpu-offload."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import wrap
from megatron_npu.errors import UsageError


@wrap(
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer.__init__",
    devices=("cpu",),
    why="on a cpu nothing is offloaded, and what is not is updated in a copy only: the model never learns, "
    "and nothing fails",
)
def refuse_on_a_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Say so at once."""

    @functools.wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "--optimizer-cpu-offload on the cpu device",
            "a device whose memory is not the host's",
            "Leave the flag away: the optimizer's state is on the cpu already.",
        )

    return initialise
