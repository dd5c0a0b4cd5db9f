"""Support ``--fine-grained-activation-offloading`` as megatron-core 0.16 does.

Saved activations are offloaded to the host. ``arguments`` adds and checks the flag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_lm.decorators import around, records
from megatron_npu.adaptors.shared import activation_offloading

activation_offloading.connect(records)


@around(
    "megatron.model.transformer:ParallelTransformer.__init__",
    devices=("npu", "cuda"),
    why="--fine-grained-activation-offloading and --offload-modules, which are newer than this version",
)
def move_what_layers_save(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Attach offloading to modules of the layers if the flags enable it."""
    from megatron import get_args

    original(self, *args, **kwargs)
    options = get_args()
    if options.offload_modules:
        activation_offloading.attach(self.layers, options.offload_modules, options.min_offloaded_tensor_size)
