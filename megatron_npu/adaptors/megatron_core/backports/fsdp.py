"""Fix Megatron's FSDP: layer names in its checkpoints, and the gradient norm of its second version."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, backport

_LAYER = re.compile(r"(?P<block>(?:^|.*\.)(?:decoder|encoder)\.layers\.)(?P<number>\d+)(?P<rest>\..*|$)")


@backport(
    "megatron.training.checkpointing:preprocess_fsdp_dtensor_state_dict",
    versions=">=0.16",
    until="not fixed up to 0.19.2, #7452/12",
    why="checkpoints of --use-megatron-fsdp name layers by their number within a pipeline stage: if loaded "
    "with another --pipeline-model-parallel-size, a stage gets the layers of the first one",
)
def name_layers_globally(
    original: Callable[..., dict[str, Any]], args: Any, raw_state_dict: dict[str, Any], model: Any
) -> dict[str, Any]:
    """Number layers by their position in the whole model instead of in their pipeline stage.

    The first stage's numbers do not change.

    The tensors are still those of the parameters, into which a checkpoint is read.
    """
    state = original(args, raw_state_dict, model)
    numbers = _numbers(model)
    if all(local == number for (_, local), number in numbers.items()):
        return state
    return {
        **state,
        **{part: _renamed(state[part], numbers) for part in ("model", "optimizer") if part in state},
    }


@backport(
    "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
    versions=">=0.20",
    until=NOT_FIXED,
    order=2,
    why="with --megatron-fsdp-version 2, squares of gradients and counts of zeros are summed twice over the "
    "data-parallel ranks: the gradient norm is too large by the square root of the number of ranks, and "
    "gradients are clipped too much",
)
def sum_shards_once(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Sum the statistics of sharded gradients over the model-parallel ranks only.

    By then, ``get_grad_norm_fp32`` and ``count_zeros_fp32`` have already summed them over the ranks that
    hold shards.
    """
    optimizer = original(*args, **kwargs)
    if type(optimizer).__name__ == "FullyShardedOptimizer":
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        optimizer.grad_stats_parallel_group = given["model_parallel_group"]
    return optimizer


def _numbers(model: Any) -> dict[tuple[str, int], int]:
    """Return each layer's index in the whole model, keyed by block and by the layer's number in this
    stage.
    """
    numbers = {}
    for name, module in model.named_modules():
        found = _LAYER.fullmatch(name)
        if found and not found["rest"] and hasattr(module, "layer_number"):
            block = found["block"].rsplit(".", 3)[-3]
            numbers[block, int(found["number"])] = module.layer_number - 1
    return numbers


def _renamed(state: Any, numbers: dict[tuple[str, int], int]) -> Any:
    if not isinstance(state, dict):
        return state
    return {_name(key, numbers): _renamed(value, numbers) for key, value in state.items()}


def _name(key: Any, numbers: dict[tuple[str, int], int]) -> Any:
    found = _LAYER.fullmatch(key) if isinstance(key, str) else None
    if found is None:
        return key
    local = int(found["number"])
    block = found["block"].rsplit(".", 3)[-3]
    return f"{found['block']}{numbers.get((block, local), local)}{found['rest']}"
