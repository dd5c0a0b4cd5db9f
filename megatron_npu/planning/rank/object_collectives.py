"""Replace barriers and object collectives in a planned rank with versions that use the same device memory.

With HCCL alone, torch makes device tensors for them; with gloo besides, tensors of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_npu.planning import alone


class ObjectCollectives:
    """Replacements for torch's object collectives.

    The replacements know which groups of the job have only HCCL.
    """

    def __init__(self) -> None:
        self._of_device: set[str] = set()  # names of groups
        self._place = distributed_c10d._get_object_coll_device
        self._gather = dist.all_gather_object

    def note(self, group: Any, asked: Any) -> None:
        """Record a process group that was just created.

        ``asked`` is the backend that the job requested, or None.
        """
        if group is None or group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_backend(group) != "hccl":
            return
        world = distributed_c10d._get_default_group()
        if "gloo" not in str(asked).lower() if asked else world.group_name in self._of_device:
            self._of_device.add(group.group_name)

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of ``torch.distributed`` to replace, keyed by name."""
        return {
            "_get_object_coll_device": self.place,
            "all_gather_object": self.all_gather_object,
            "gather_object": alone.gather_object,
            "broadcast_object_list": alone.nothing,
        }

    def place(self, group: Any = None) -> str:
        """Return the type of device on which a group exchanges barriers and objects."""
        known = group or distributed_c10d._get_default_group()
        name = getattr(known, "group_name", None)  # a backend, which some callers have, has none
        return "npu" if name in self._of_device else self._place(group)

    def all_gather_object(self, objects: list[Any], mine: Any, group: Any = None) -> None:
        """Fill ``objects`` with this rank's own object, after allocating device memory in the same way as
        torch.
        """
        if self.place(group) == "npu":  # what arrives is nobody's
            with mock.patch.object(distributed_c10d, "_tensor_to_object", alone.nothing):
                self._gather(list(objects), mine, group)
        alone.all_gather_object(objects, mine, group)
