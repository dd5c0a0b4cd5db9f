"""``megatron.core.distributed.fsdp.mcore_fsdp_adapter``: --use-megatron-fsdp."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_npu.errors import UsageError
from megatron_npu.hosts.megatron_core.records import wrap


@wrap(
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel.__init__",
    versions=">=0.14",
    devices=("cpu",),
    why="its buffers, streams and memory pool are those of CUDA; it ends in 'invalid device string cuda:cpu'",
)
def refuse_on_a_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Say so at once."""

    @functools.wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "Megatron-FSDP (--use-megatron-fsdp) on the cpu device",
            "a way to share parameters that needs no CUDA",
            "Use --use-torch-fsdp2, or --use-distributed-optimizer.",
        )

    return initialise
