"""Route a chosen share of all tokens to the experts of a planned rank.

The real routing is unknown.

The experts of this rank get a chosen multiple of an even share, and the other experts share the rest. Its
peers are assumed to have the same routing, and therefore to send it the same number of tokens.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import _disable_current_modes

_ROUTER = "TopKRouter"


@dataclass(frozen=True)
class Routing:
    """The distribution of tokens over the experts.

    Attributes:
        experts: the number of experts per layer.
        chosen: the number of experts per token.
        own: this rank's experts, as the first index and the index after the last.
        capacity: the multiple above which an expert drops tokens. If None, there is no limit.
    """

    experts: int
    chosen: int
    own: tuple[int, int]
    capacity: float | None = None

    @property
    def most(self) -> float:
        """The largest multiple of an even share of tokens that this rank's experts can receive."""
        count = self.own[1] - self.own[0]
        largest = min(self.chosen, count) * self.experts / (self.chosen * count)
        return largest if self.capacity is None else min(largest, max(1.0, self.capacity))

    def map(self, tokens: int, multiple: float) -> torch.Tensor:
        """Return a routing map ``[tokens, experts]`` in which this rank's experts get ``multiple`` times
        an even share, or as much as they can.
        """
        first, behind = self.own
        count, others = behind - first, self.experts - (behind - first)
        total = round(min(multiple, self.most) * tokens * self.chosen * count / self.experts)
        ends = torch.arange(tokens + 1) * total // max(tokens, 1)
        # a token cannot choose more experts elsewhere than there are
        own = ends.diff().clamp(max(0, self.chosen - others), min(self.chosen, count))
        result = torch.zeros(tokens, self.experts, dtype=torch.bool)
        _choose(result[:, first:behind], own)
        elsewhere = torch.cat([torch.arange(first), torch.arange(behind, self.experts)])
        rest = torch.zeros(tokens, others, dtype=torch.bool)
        _choose(rest, self.chosen - own)
        result[:, elsewhere] = rest
        return result


def _choose(into: torch.Tensor, counts: torch.Tensor) -> None:
    """Set ``counts[i]`` elements in row i of ``into`` ``[tokens, experts]``, using the experts in turn."""
    experts = into.size(1)
    starts = counts.cumsum(0) - counts
    for number in range(int(counts.max()) if counts.numel() else 0):
        rows = torch.nonzero(counts > number).squeeze(1)
        into[rows, (starts[rows] + number) % experts] = True


Place = Callable[[torch.Tensor, torch.device], torch.Tensor]


@contextlib.contextmanager
def chosen(multiple: float, report: dict[str, Any], place: Place = torch.Tensor.to) -> Iterator[None]:
    """Replace the choices of routers without padded capacity.

    Args:
        multiple: the tokens of this rank's experts, as a multiple of an even share.
        report: the largest multiple is added here.
        place: copies a routing map to a device.
    """
    kept: dict[tuple[Any, ...], torch.Tensor] = {}

    def routed(module: torch.nn.Module, _: Any, output: Any) -> Any:
        if _ROUTER not in (each.__name__ for each in type(module).__mro__):
            return None
        if getattr(module.config, "moe_pad_expert_input_to_capacity", False):
            return None
        if not (isinstance(output, tuple) and len(output) == 2 and output[1].dtype is torch.bool):
            report["unknown_routing"] = type(module).__name__
            return None
        scores, found = output
        routing = _of(module.config)
        report["routing_most"] = routing.most
        key = (routing, found.size(0), found.device)
        if key not in kept:
            with _disable_current_modes():  # fake tensors hold no values
                kept[key] = routing.map(found.size(0), multiple)
        # not in place: what is written over a router's own map would be asked for by autograd
        return scores, place(kept[key], found.device)

    handle = modules.register_module_forward_hook(routed)
    try:
        yield
    finally:
        handle.remove()


def _of(config: Any) -> Routing:
    parallel = sys.modules["megatron.core.parallel_state"]
    size = parallel.get_expert_model_parallel_world_size()
    rank = parallel.get_expert_model_parallel_rank()
    each = config.num_moe_experts // size
    capacity = getattr(config, "moe_expert_capacity_factor", None)
    own = (rank * each, (rank + 1) * each)
    return Routing(config.num_moe_experts, config.moe_router_topk, own, capacity)
