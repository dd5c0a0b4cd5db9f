"""DeepSpeed's engine, which trains with ``--deepspeed``, as today's DeepSpeed takes it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_deepspeed.decorators import around


@around(
    "megatron.training:setup_model_and_optimizer",
    why="it hands deepspeed.initialize the configuration twice, as values and by the name of its file, which "
    "DeepSpeed refuses since 0.7",
)
def name_the_configuration_once(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hide the file's name from DeepSpeed, which has its values."""
    deepspeed: Any = importlib.import_module("deepspeed")
    real = deepspeed.initialize

    def initialize(*, args: Any, **given: Any) -> Any:
        path, args.deepspeed_config = args.deepspeed_config, None
        try:
            return real(args=args, **given)
        finally:
            args.deepspeed_config = path

    deepspeed.initialize = initialize
    try:
        return original(*args, **kwargs)
    finally:
        deepspeed.initialize = real
