"""Choose and log the HCCL buffer sizes of process groups."""

from __future__ import annotations

import functools
import logging

from torch.distributed import ProcessGroup

from megatron_npu.devices import hccl
from megatron_npu.options import hccl_buffers

logger = logging.getLogger(__name__)

WHY = (
    f"HCCL reserves 2 x 200 MiB of device memory for each group's communicator; {hccl_buffers.FLAG} "
    "requests only what its largest message needs"
)


def fit_group(group: ProcessGroup, name: str) -> None:
    """Choose the buffer size of the process group ``name`` from the message sizes that the arguments imply.

    If the options of the group set the buffer size, it is not changed.
    """
    _fit(group, name, hccl_buffers.size_of_group(name))


def fit_buffer(group: ProcessGroup, message: int, name: str) -> None:
    """Choose a process group's buffer size from its largest message in bytes, unless its options already
    set it.
    """
    _fit(group, name, hccl_buffers.size_of(message))


def _fit(group: ProcessGroup, name: str, size: int | None) -> None:
    run, known = hccl_buffers.of_run(), hccl.buffer_of(group)
    if size is None or run is None or (known is not None and known != run.fitted.get(group.group_name)):
        return
    size = max(size, known or 0)  # each chunk of an interleaved pipeline has a DDP of its own
    if hccl.set_buffer(group, size):
        run.fitted[group.group_name] = size
        say_buffer(name, size)


def say_buffer(group: str, mebibytes: int | None) -> None:
    """Log once how much device memory a communicator uses, and how much it would use by default, in MiB."""
    default = hccl_buffers.default()
    if mebibytes is not None and mebibytes != default:
        _say_once(group, mebibytes, default)


@functools.cache
def _say_once(group: str, mebibytes: int, default: int) -> None:
    saved = 2 * (default - mebibytes)
    what = f"{saved} MiB less" if saved >= 0 else f"{-saved} MiB more"
    logger.warning(
        "HCCL's buffers for group %s have 2 x %d MiB instead of 2 x %d MiB, which is %s of device memory",
        *(group, mebibytes, default, what),
    )
