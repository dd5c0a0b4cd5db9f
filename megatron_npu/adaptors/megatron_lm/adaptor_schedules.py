"""``megatron.schedules``: where every training step passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_npu import devices
from megatron_npu.adaptors.megatron_lm.decorators import watch, wrap
from megatron_npu.patching import banner

_MODULE = "megatron.schedules"

watch(
    f"{_MODULE}:backward_step",
    why="an overflow is looked for once a step, in the schedules and the optimizer, not once a micro-batch",
)
watch(
    f"{_MODULE}:deallocate_output_tensor",
    why="shrinking .data works on every device; a pending gloo send keeps the memory that it reads",
)


@wrap(
    f"{_MODULE}:get_forward_backward_func",
    why="asked for before each step: the place to say once what was patched",
)
def announce_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Print the ledger's one line on rank 0 before the first step."""

    @functools.wraps(original)
    def get_forward_backward_func() -> Any:
        banner.before_step()
        return original()

    return get_forward_backward_func


def clear_overflow_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Clear the device's overflow flag before the first micro-batch of a step with loss scaling."""

    @functools.wraps(original)
    def schedule(
        forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if getattr(optimizer, "grad_scaler", None) is not None:
            devices.current().clear_overflow()
        return original(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)

    return schedule


for _name in (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
):
    wrap(
        f"{_MODULE}:{_name}",
        devices=("npu",),
        why="Ascend chips before 910B set a flag on overflow, which stays until it is cleared",
    )(clear_overflow_first)
