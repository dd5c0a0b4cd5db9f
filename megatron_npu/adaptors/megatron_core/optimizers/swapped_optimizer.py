"""Support ``--swap-optimizer``, which keeps Adam's moments in host memory.

Patches the place in ``megatron.core.optimizer`` where the optimizer of a parameter group is built;
``arguments`` adds the flag and configures ``FusedAdam``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import around, fused_optimizer_present
from megatron_npu.ops.optimizers.adam import FusedAdam
from megatron_npu.options import memory_flags


def tell_adam(args: Namespace) -> None:
    """Enable the swapping of moments in Adam, or reject the flag.

    Raises:
        UsageError: the flag is not supported here.
    """
    memory_flags.check_swap_optimizer(args)
    FusedAdam.swap_moments = args.swap_optimizer


@around(
    "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
    devices=("npu",),
    condition=fused_optimizer_present,
    why="before a checkpoint is saved or loaded, upstream creates all moments on the device, where "
    "--swap-optimizer leaves no room for them",
)
def make_moments_by_ourselves(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make our Adam allocate the moments in swapped memory."""
    result = original(*args, **kwargs)
    adam = getattr(result, "optimizer", None)
    if isinstance(adam, FusedAdam) and adam.swap_moments:
        result.init_state_fn = _initialize
    return result


def _initialize(adam: FusedAdam, config: Any = None) -> None:
    """Create the optimizer states that are missing.

    The arguments are those of upstream's function.
    """
    for parameter in (p for group in adam.param_groups for p in group["params"]):
        if not adam.state[parameter]:
            adam.initialize_state(parameter)
