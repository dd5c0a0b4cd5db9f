"""Support ``--use-precision-aware-optimizer`` with our Adam, which stores 16-bit states on every device.

Patches ``optimizer.optimizer_config`` and the place in ``optimizer`` where the optimizer of a parameter group
is built; ``arguments`` adds ``--reuse-fp32-param`` and makes ``memory_flags`` reject invalid combinations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import around, fused_optimizer_present
from megatron_npu.ops.optimizers.adam import FusedAdam
from megatron_npu.options import memory_flags

_around = partial(around, condition=fused_optimizer_present)
_NAME = "transformer_engine.pytorch.optimizers"


class _OursToKeep(int):
    """An integer that upstream treats as false but that makes our Adam store the remainders of parameters.

    Upstream disables the option. As a field of the configuration, the value is part of every copy
    (``dataclasses.replace``).
    """


@contextmanager
def _importable_from_transformer_engine() -> Iterator[None]:
    """Make our ``FusedAdam`` importable from TransformerEngine, which is not installed, inside the
    ``with`` block.
    """
    parts = _NAME.split(".")
    modules = {".".join(parts[: i + 1]): ModuleType(".".join(parts[: i + 1])) for i in range(len(parts))}
    modules[parts[0]].__version__ = "0.0.0"  # type: ignore[attr-defined]  # as 0.18 says of an absent one
    modules[_NAME].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


@_around(
    "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
    upstream_bug=True,
    until="the patch is needed without TransformerEngine; the bug is in every version up to 0.19.2, #7288",
    why="a resume with --use-precision-aware-optimizer creates the optimizer's whole state a second time, "
    "which needs memory: TransformerEngine's FusedAdam casts and copies what upstream passes back to it; "
    "ours, which takes its place where TransformerEngine is absent, keeps the tensors",
)
def configure_with_our_adam(original: Callable[[Any], None], self: Any) -> None:
    """Make upstream inspect our Adam, and preserve the user's request for remainders, which upstream would
    disable.

    Raises:
        UsageError: a state has a dtype that our Adam does not support.
    """
    if not self.use_precision_aware_optimizer or self.optimizer_cpu_offload:
        original(self)
        return
    memory_flags.refuse_fp8_states(self)
    asked = getattr(self, "store_param_remainders", None)  # a field since 0.13; 0.12 always does
    with _importable_from_transformer_engine():
        original(self)
    if asked or isinstance(asked, _OursToKeep):
        self.store_param_remainders = _OursToKeep()


@_around(
    "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
    versions=">=0.13,<0.14",
    upstream_bug=True,
    until="0.14",
    why="without an fp8 recipe the precision-aware optimizer is built without the gradients that it is "
    "given later: nothing is trained",
)
def name_a_recipe(original: Callable[[Any], None], self: Any) -> None:
    """Set the fp8 recipe to the default of the scripts if no recipe is set."""
    if self.use_precision_aware_optimizer and self.fp8_recipe is None:
        self.fp8_recipe = "delayed"
    original(self)


@_around(
    "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
    why="without TransformerEngine 2.1 upstream does not request remainders instead of fp32 main weights "
    "(store_param_remainders, on by default), which our Adam supports; checkpoints contain fp32 either "
    "way",
    order=1,
)
def ask_for_remainders(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """Enable remainders when the optimizer is built, before it has any state."""
    result = original(config, *args, **kwargs)
    adam = getattr(result, "optimizer", None)
    if isinstance(adam, FusedAdam) and adam.use_decoupled_grad:
        kept = getattr(config, "store_param_remainders", _OursToKeep())
        adam.store_param_remainders = isinstance(kept, _OursToKeep)
    return result
