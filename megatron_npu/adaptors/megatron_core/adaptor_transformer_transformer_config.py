"""``megatron.core.transformer.transformer_config``: options that need TransformerEngine or CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core import unsupported_options
from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, transformer_engine_present, wrap


@wrap(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    condition=transformer_engine_present,
    why="without TransformerEngine fp8 is silently another precision; overlapped communication, its "
    "cross-entropy and the fusions of experts end in an assertion, a NameError or an ImportError",
)
def without_transformer_engine(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Refuse what changes the run; leave out, and say so, what changes only how layers are launched."""

    @functools.wraps(original)
    def check(self: Any) -> None:
        unsupported_options.refuse(self, unsupported_options.NEED_TRANSFORMER_ENGINE)
        reason = "TransformerEngine is not installed"
        unsupported_options.switch_off(self, unsupported_options.DO_WITHOUT_TRANSFORMER_ENGINE, reason)
        original(self)

    return check


@wrap(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    devices=WITHOUT_CUDA,
    why="CUDA graphs are captured from CUDA streams: the first step ends in an assertion",
)
def without_cuda_graphs(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Launch every kernel by itself, and say so."""

    @functools.wraps(original)
    def check(self: Any) -> None:
        reason = f"there are no CUDA graphs on the {devices.current().name} device"
        unsupported_options.switch_off(self, unsupported_options.CUDA_GRAPHS, reason)
        original(self)

    return check
