"""``megatron.training``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from megatron_npu import devices
from megatron_npu.adaptors.megatron_lm.decorators import constant, wrap


@wrap(
    "megatron.training:get_model",
    devices=("cpu",),
    why="weights that are initialised on the host draw from the host's generator; on a cpu the default one "
    "is the device's",
)
def build_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the model with the host's generator in force; the RNG tracker's own states are not affected."""

    @functools.wraps(original)
    def get_model(*args: Any, **kwargs: Any) -> Any:
        with devices.current().host_rng():
            return original(*args, **kwargs)

    return get_model


class HostDistributedDataParallel(DistributedDataParallel):
    """torch's DDP without ``device_ids``, which it refuses for a module in upstream memory."""

    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)


constant(
    "megatron.training:torchDDP",
    HostDistributedDataParallel,
    devices=("cpu",),
    why="--DDP-impl torch passes device_ids, which torch refuses for modules on the cpu",
)
