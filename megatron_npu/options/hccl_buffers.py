"""Implement ``--hccl-group-buffer-adaptive``, which chooses the size of HCCL's buffers from each group's
largest message.

HCCL allocates two buffers per communicator, 200 MiB each by default. According to its documentation
(HCCL_BUFFSIZE), each should be as large as the data of a call; a larger message only takes more time. The
message sizes of a group follow from the arguments, except for gradients, whose buckets depend on the model
(``adaptors.shared.communicators``).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_npu import devices
from megatron_npu.base import digits
from megatron_npu.base.errors import UsageError
from megatron_npu.options.hccl_messages import MessageSizes

FLAG = "--hccl-group-buffer-adaptive"
DEFAULT = 200  # MiB, of each of a communicator's two (documentation of HCCL_BUFFSIZE)
_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class GroupBuffers:
    """The HCCL buffer sizes of a run.

    Each group's buffer is as large as its largest message.

    The buffer sizes are stored in the process's device.

    Attributes:
        args: the validated arguments of Megatron or of the built-in trainer.
        fitted: the chosen size in MiB, keyed by the name of the group.
    """

    args: argparse.Namespace
    fitted: dict[str, int] = field(default_factory=dict)

    def largest_messages(self) -> dict[str, int]:
        """The size of the largest message of each group, computed from the current arguments; see
        ``MessageSizes``.

        Megatron sets some of them, such as the size of the vocabulary, after it has validated the others.
        """
        return MessageSizes.of(self.args).largest()


def add(declare: Callable[..., Any]) -> None:
    """Add ``--hccl-group-buffer-adaptive``, a flag with the same name as in MindSpeed, to a parser.

    Args:
        declare: ``add_argument`` of a parser or group.
    """
    declare(
        FLAG,
        action="store_true",
        help=(
            "set the size of HCCL's buffers to the largest message of each process group, if that is "
            "smaller than the default of 2 x 200 MiB; sizes in --nccl-communicator-config-path take "
            "precedence; NPU only"
        ),
    )


def choose(args: argparse.Namespace) -> None:
    """Store the arguments of the run, from which buffer sizes are computed when process groups are created.

    Raises:
        UsageError: the flag is given, but the device is not an NPU.
    """
    asked, device = getattr(args, "hccl_group_buffer_adaptive", False), devices.current()
    if asked and device.name != "npu":
        raise UsageError(
            f"{FLAG} applies only to HCCL on an Ascend NPU, but the device is {device.name}",
            remedy="Remove the flag.",
        )
    device.group_buffers = GroupBuffers(args) if asked else None


def of_run() -> GroupBuffers | None:
    """Return the buffer sizes that ``choose`` has stored, or None if the run does not use the flag."""
    noted = devices.current().group_buffers
    assert noted is None or isinstance(noted, GroupBuffers)
    return noted


def asked() -> bool:
    """Return True if this run uses the flag ``--hccl-group-buffer-adaptive``."""
    return of_run() is not None


def default() -> int:
    """Return the default size of one HCCL buffer in MiB."""
    return digits.number(os.environ.get("HCCL_BUFFSIZE", "")) or DEFAULT


def size_of_group(name: str) -> int | None:
    """Return the buffer size in MiB for the process group ``name`` of upstream, such as ``tp``, or None
    if unknown.
    """
    run = of_run()
    largest = None if run is None else run.largest_messages().get(name)
    return None if largest is None else size_of(largest)


def size_of(message: int) -> int:
    """Return the buffer size in MiB for messages of the given number of bytes, limited to the default
    size.
    """
    return min(max(1, -(-message // _MEBIBYTE)), default())
