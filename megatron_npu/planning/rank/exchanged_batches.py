"""Exchange batches between the planned ranks that read data and the planned ranks that receive it.

Megatron's scripts read data on the first tensor-parallel rank, which broadcasts the sizes, tokens and masks
to the others. These values decide what the others allocate: a causal mask is recognized, any other is kept. A
planned rank therefore writes the integers and booleans that it broadcasts to a folder, and a rank that runs
later finds there what it receives.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# bytes; a dry run knows the values of no larger tensor, and of conditions an eighth counts
_LARGEST = 1 << 20


@contextlib.contextmanager
def exchanged(folder: Path) -> Iterator[None]:
    """Write this rank's broadcasts to ``folder``, and read the broadcasts of other ranks from it.

    Raises:
        RuntimeError: inside the block, if a rank receives another number of bytes than was sent.
    """
    send = dist.broadcast
    signature = inspect.signature(send)
    counts: Counter[str] = Counter()

    @functools.wraps(send)
    def broadcast(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        bound = signature.bind(tensor, *given, **named).arguments
        source, group = _source(bound)
        work = send(tensor, *given, **named)
        if source is not None:
            key = f"{source}-{group}"
            counts[key] += 1
            if _is_small(tensor):
                own = source == dist.get_rank()
                (_write if own else _read)(folder, f"{key}-{counts[key]}", tensor)
        return work

    with contextlib.ExitStack() as stack:
        for owner in (dist, distributed_c10d):
            stack.enter_context(mock.patch.object(owner, "broadcast", broadcast))
        yield


def _source(arguments: dict[str, Any]) -> tuple[int | None, str]:
    """Return the global rank of the sender, and the name of the group.

    Return None if this rank is not in the group.
    """
    group = arguments.get("group") or distributed_c10d._get_default_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None, ""
    source = arguments.get("src")
    if source is None:
        source = dist.get_global_rank(group, arguments.get("group_src") or 0)
    return source, str(group.group_name)


def _is_small(tensor: torch.Tensor) -> bool:
    limit = _LARGEST * (8 if tensor.dtype is torch.bool else 1)
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    return whole and tensor.is_contiguous() and 0 < _size(tensor) <= limit


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write(folder: Path, name: str, tensor: torch.Tensor) -> None:
    _wait_for(tensor)
    content = ctypes.string_at(tensor.data_ptr(), _size(tensor))
    path = folder / hashlib.sha256(content).hexdigest()  # masks of all micro batches are often equal
    if not path.exists():
        path.write_bytes(content)
    (folder / name).write_text(path.name, encoding="utf-8")


def _read(folder: Path, name: str, tensor: torch.Tensor) -> None:
    path = folder / name
    if not path.exists():  # the sender is not among the planned ranks
        return
    content = (folder / path.read_text(encoding="utf-8")).read_bytes()
    if len(content) != _size(tensor):
        raise RuntimeError(
            f"a broadcast sends {len(content)} bytes, but this rank expects {_size(tensor)} bytes "
            f"({tensor.dtype}, {list(tensor.shape)})"
        )
    _wait_for(tensor)
    ctypes.memmove(tensor.data_ptr(), content, len(content))


def _wait_for(tensor: torch.Tensor) -> None:
    """Wait until the simulated device has finished all work on a tensor, so that the host can read it."""
    if tensor.device.type == "npu":
        torch.npu.synchronize()  # type: ignore[attr-defined]
