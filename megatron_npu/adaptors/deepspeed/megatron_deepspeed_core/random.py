"""Use the device's random generator in the RNG tracker, and the host's generator for initial weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import around, records
from megatron_npu.adaptors.shared import random

random.connect(records, "megatron.core.tensor_parallel.random")
random.connect_host(records)

_DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


@around(
    "megatron.training:get_model",
    why="with ZeRO 3 DeepSpeed creates every tensor of the model on the device, in the dtype of the "
    "weights: --use-cpu-initialization would draw different weights than without ZeRO 3, and different "
    "ones on each type of device",
    order=1,
)
def draw_on_host(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build the model with the initial weights that a model on the host would have."""
    from megatron import get_args

    given = get_args()
    if given.zero_stage != 3 or not given.use_cpu_initialization:
        return original(*args, **kwargs)
    with HostDraws():
        return original(*args, **kwargs)


class HostDraws(TorchDispatchMode):
    """Fill tensors with fp32 random values from the host's generator, regardless of their device and
    dtype.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the torch function ``func``, drawing random values from the host's generator.

        If it draws random values, draw them on the host and copy them to the device.
        """
        if func not in _DRAWS:
            return func(*args, **(kwargs or {}))
        filled: Tensor = args[0]
        # not torch.empty, which DeepSpeed replaces while it builds a model
        drawn = torch.ops.aten.empty.memory_format(filled.shape, dtype=torch.float32, device="cpu")
        return filled.copy_(func(drawn, *args[1:], **(kwargs or {})))
