"""Check that megatron-core is installed on the machine, and that each process has a device."""

from __future__ import annotations

import os
from argparse import Namespace

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import derive
from megatron_npu.upstream import megatrons


def check(args: Namespace) -> None:
    """Check that megatron-core is installed, and that there is a device for each process.

    Raises:
        UsageError: megatron-core or a device is missing.
    """
    derive.version(args, require_megatron_core())
    derive.process(args)
    device, local = devices.current(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local > device.count():
        raise UsageError(
            f"torchrun started {local} processes on a machine with {device.count()} {device.name} "
            "device(s); there must be at most one process per device",
            remedy="Pass a smaller --nproc-per-node to torchrun.",
        )


def require_megatron_core() -> str:
    """Return the version of the first megatron-core on the Python path.

    Raises:
        UsageError: another Megatron precedes it on the path, it is not installed, or its version is not
            supported.
    """
    found = megatrons.find()
    found.require_supported()
    if found.name != "megatron_core":
        raise UsageError(
            f"megatron-core is required, but the Megatron in {found.root} is {found.name} {found.version}",
            remedy="Use its own script with `megatron-npu run`, or start from another folder (`python "
            "-m` searches the current one first) with the wheel installed: pip install "
            "megatron-core==0.16.1.",
        )
    return found.version
