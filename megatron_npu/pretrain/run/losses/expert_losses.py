"""Collect the experts' balancing losses for the log.

megatron-core itself adds their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.pretrain.flags.plan_parts import ExpertFlags

# --moe-router-load-balancing-type -> megatron-core's name for what it measures
_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
_Value = TypeVar("_Value")
LOSSES = (*_NAMES.values(), "z_loss")


def names(flags: ExpertFlags) -> list[str]:
    """Return the names that megatron-core gives to a run's balancing losses."""
    if flags.num_experts is None:
        return []
    kinds, weights = flags.moe_router_load_balancing_type, flags.moe_aux_loss_coeff
    pairs = [*zip(_each(kinds), _each(weights), strict=True)]
    found = [_name(kind, flags.megatron_version) for kind, weight in pairs if weight]
    return found + ["z_loss"] * (flags.moe_z_loss_coeff is not None)


def _each(values: _Value | list[_Value]) -> list[_Value]:
    return values if isinstance(values, list) else [values]


def _name(kind: str, version: str) -> str:
    """Return the name that megatron-core gives to a loss.

    Up to 0.13, the sequence-level loss has no separate name.
    """
    old = tuple(map(int, version.split(".")[:2])) < (0, 14)
    return "load_balancing_loss" if old else _NAMES[kind]


@dataclass(frozen=True)
class ExpertLosses:
    """The balancing losses of a run's experts.

    Attributes:
        names: megatron-core's names for these losses.
        layers: whether each layer has experts; multi-token prediction layers come last.
    """

    names: tuple[str, ...]
    layers: tuple[bool, ...]

    @staticmethod
    def of(flags: ExpertFlags) -> ExpertLosses:
        """Create the balancing losses for a run with the given flags."""
        return ExpertLosses(tuple(names(flags)), flags.layers)

    def take(self, micro_batches: int) -> dict[str, list[float]]:
        """Return the mean of each balancing loss since the last call, for each layer that has experts.

        The values are unweighted, as Megatron logs them: 1 is perfect balance. A collective: all ranks must
        call it.

        Args:
            micro_batches: the number of micro batches per rank since the last call.
        """
        from megatron.core import parallel_state

        if not self.names:
            return {}
        device = devices.current().torch_device()
        own = torch.zeros(len(self.names), len(self.layers), dtype=torch.float32, device=device)
        for row, name in zip(own, self.names, strict=True):
            _take_into(row, name)
        # megatron-core's own reduction leaves data parallelism out of some, of others in each version
        dist.all_reduce(own)
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        own *= stages / (dist.get_world_size() * micro_batches)
        return {
            name: [value for value, has in zip(row, self.layers, strict=True) if has]
            for name, row in zip(self.names, own.tolist(), strict=True)
        }

    def forget(self) -> None:
        """Discard values from an earlier run in this process, which may have had another number of layers."""
        if self.names:
            from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

            _tracker().clear()
            # made with another shape ([] in a backward pass, [1] by the schedule): 0.16 then fails to copy
            MoEAuxLossAutoScaler.main_loss_backward_scale = None


def _take_into(row: torch.Tensor, name: str) -> None:
    """Add the recorded values of a loss, ``[layers]``, to ``row``, and reset them."""
    tracker = _tracker()
    if name not in tracker:
        return
    values = tracker[name]["values"]
    row[: len(values)] += values  # 0.12 has no places for the layers of multi-token prediction
    group = tracker[name]["reduce_group"]
    if group is not None:  # each rank has measured a part of the tokens' loss
        dist.all_reduce(row, group=group)
    tracker[name]["values"].zero_()


def _tracker() -> dict[str, dict[str, Any]]:
    from megatron.core import parallel_state

    try:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
    except ImportError:  # 0.12 has it elsewhere
        return parallel_state.get_moe_layer_wise_logging_tracker()
    return get_moe_layer_wise_logging_tracker()
