"""Create process groups in a single process, without the other ranks of the planned job.

On the simulated NPU, the groups are torch_npu's own; the simulated HCCL counts each call and returns
immediately, as if every other rank had the same data as this one. Groups on the host are torch's fake groups.
Collectives of objects return this rank's own object for every rank.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import fake_pg

from megatron_npu import watchdog
from megatron_npu.planning import alone
from megatron_npu.planning.rank.object_collectives import ObjectCollectives
from megatron_npu.watchdog import first_contact

_ROOT_INFO = bytes(4108)  # HCCL_ROOT_INFO_BYTES; a dry run does not read it

# who reads the data tells the others which there are: to train, to validate and to test on
_DATA_SETS = 3


class Nobody(dist.Store):
    """A store in which every key exists.

    Keys that were never set contain zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Set the value of a key."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return the value of a key."""
        return self._values.get(key, _ROOT_INFO)

    def add(self, key: str, amount: int) -> int:
        """Add a number to a counter, and return the result."""
        number = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(number).encode()
        return number

    def check(self, keys: list[str]) -> bool:
        """Return True if this process has set all of the given keys.

        No other rank reports failures.
        """
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return immediately, because every key exists."""

    def delete_key(self, key: str) -> bool:
        """Delete a key and its value."""
        return self._values.pop(key, None) is not None

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the timeout."""


@contextlib.contextmanager
def absent(backend: Callable[[Any], str]) -> Iterator[None]:
    """Inside the ``with`` block, create process groups whose other ranks do not exist.

    Args:
        backend: the backend to use in place of the requested one.
    """
    init, new = dist.init_process_group, dist.new_group
    stores: list[dist.Store] = []  # torch itself keeps only the part of them that is not Python's
    objects = ObjectCollectives()

    @functools.wraps(init)  # who looks at the signature finds torch's
    def init_process_group(*given: Any, **named: Any) -> None:
        asked = inspect.signature(init).bind(*given, **named).arguments.get("backend")
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        stores.append(Nobody())
        init(backend(asked), store=stores[-1], rank=rank, world_size=ranks)
        group = distributed_c10d._get_default_group()
        objects.note(group, asked)
        _join_hosts(group)

    @functools.wraps(new)
    def new_group(*given: Any, **named: Any) -> Any:
        arguments = inspect.signature(new).bind(*given, **named).arguments
        asked = arguments.get("backend")
        arguments["backend"] = backend(asked)
        group = new(**arguments)
        objects.note(group, asked)
        _join_hosts(group)
        return group

    send = dist.broadcast

    @functools.wraps(send)
    def broadcast(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        source = inspect.signature(send).bind(tensor, *given, **named).arguments.get("src")
        if source != dist.get_rank() and tensor.dtype is torch.int64 and tensor.numel() == _DATA_SETS:
            tensor.fill_(1)
        return send(tensor, *given, **named)

    functions: dict[str, Callable[..., Any]] = {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "broadcast": broadcast,
        **objects.functions(),
        "_store_based_barrier": alone.nothing,
        "destroy_process_group": alone.nothing,  # what the groups have cost is read at the end
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_first_contact())
        for name, function in functions.items():
            for owner in (dist, distributed_c10d):
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, function))
        yield


@contextlib.contextmanager
def no_first_contact() -> Iterator[None]:
    """Skip checks of other machines, such as whether they answer and whether they can open enough files."""
    with (
        mock.patch.object(first_contact, "made", contextlib.nullcontext),
        mock.patch.object(watchdog, "require_open_files"),
    ):
        yield


def of_npu(asked: Any) -> str:
    """Return the backend for a group on the simulated NPU, which is HCCL, or torch's fake backend for
    host tensors.
    """
    return fake_pg.dist.Backend.FAKE if str(asked).lower() in ("gloo", "mpi") else "hccl"


def _join_hosts(group: Any) -> None:
    """Make a group also accept host tensors, as gloo does.

    Naming two backends does not work, because torch keeps one backend of each type, and HCCL and the fake
    backend have the same type.
    """
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_backend(group) != "hccl":
        return
    fake = fake_pg.FakeProcessGroup._create_internal(group.rank(), group.size(), None)  # type: ignore[call-arg]
    name, description = group.group_name, group.group_desc
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, fake)
    # a group says what the first of its backends says, which has none
    group._set_group_name(name)
    group._set_group_desc(description)
