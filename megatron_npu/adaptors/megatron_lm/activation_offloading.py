"""``--fine-grained-activation-offloading``, megatron-core 0.16's flag: what layers save rests on the host."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_npu import memory_flags
from megatron_npu.adaptors.megatron_lm.decorators import around, records
from megatron_npu.adaptors.shared import activation_offloading

activation_offloading.connect(records)

_WHY = "--fine-grained-activation-offloading and --offload-modules, which are younger"


@around("megatron.arguments:_add_training_args", why=_WHY)
def add_flags(
    original: Callable[..., argparse.ArgumentParser], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """Declare them after upstream's own flags."""
    parser = original(parser)
    memory_flags.add_activation_offloading(parser.add_argument)
    return parser


@around("megatron.arguments:validate_args", why=_WHY)
def check_flags(
    original: Callable[..., argparse.Namespace], args: argparse.Namespace, *rest: Any
) -> argparse.Namespace:
    """Refuse what cannot be, once upstream has worked out what is recomputed."""
    validated = original(args, *rest)
    memory_flags.check_activation_offloading(validated)
    return validated


@around(
    "megatron.model.transformer:ParallelTransformer.__init__",
    devices=("npu", "cuda"),
    why=_WHY,
)
def move_what_layers_save(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Attach to the layers' modules, if that is asked for."""
    from megatron import get_args

    original(self, *args, **kwargs)
    options = get_args()
    if options.offload_modules:
        activation_offloading.attach(self.layers, options.offload_modules, options.min_offloaded_tensor_size)
