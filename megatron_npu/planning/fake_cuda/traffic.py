"""Count the calls and the bytes of the collectives of each process group on simulated CUDA devices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

_NAMES = {  # c10d operations, and the argument that holds what they send; None: they send nothing
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "send"), 0),
    **dict.fromkeys(("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"), 1),
    **dict.fromkeys(("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"), 1),
    **dict.fromkeys(("alltoall_", "alltoall_base_", "allgather_coalesced_", "gather_", "scatter_"), 1),
    **dict.fromkeys(("recv_", "recv_any_source_", "barrier"), None),
}
_SENT = {getattr(torch.ops.c10d, name): place for name, place in _NAMES.items()}


class Traffic:
    """The counts for each group description, which are ``ranks``, ``calls``, ``bytes``, and ``buffer``
    (always 0).
    """

    def __init__(self) -> None:
        self.groups: dict[str, dict[str, int]] = {}
        self.members: dict[str, list[int]] = {}  # the first and the last rank of each

    def note(self, packet: Any, args: Any) -> None:
        """Count an operation if it belongs to a process group."""
        if packet not in _SENT:
            return
        group = next(each for each in map(_group, args) if each is not None)
        place = _SENT[packet]
        sent = [] if place is None else pytree.tree_leaves(args[place])
        entry = self.groups.setdefault(
            group.group_desc, {"ranks": group.size(), "buffer": 0, "calls": 0, "bytes": 0}
        )
        if group.group_desc not in self.members:  # a job destroys its groups at its end
            ranks = sorted(dist.get_process_group_ranks(group))
            self.members[group.group_desc] = [ranks[0], ranks[-1]]
        entry["calls"] += 1
        entry["bytes"] += sum(each.numel() * each.element_size() for each in sent if isinstance(each, Tensor))


def _group(argument: Any) -> dist.ProcessGroup | None:
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(argument)
    except RuntimeError:  # a reduction or a request
        return None
