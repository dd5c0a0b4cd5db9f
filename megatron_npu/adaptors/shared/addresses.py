"""Support checkpoints of stock scripts in object storage (``msc://``), if upstream is able to write them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_npu.base.errors import UsageError

MARK = "_SUCCESS"  # the last object of a checkpoint
_OURS = ("save_per_machine", "load_last_good")
_MOUNT = "Mount the storage, or save to a disk and copy complete checkpoints."


def is_address(place: str | Path | None) -> bool:
    """Return True if a path is an address in object storage rather than a folder."""
    return "://" in str(place)


def require_supported(args: Any) -> None:
    """Check that upstream can read and write the addresses given by ``--save`` and ``--load``.

    Raises:
        UsageError: upstream does not support the address, and would create a folder with that name.
    """
    for flag in ("save", "load"):
        place = getattr(args, flag, None)
        if place and is_address(place):
            _require_client(f"--{flag} {place}", str(place), args)
            _require_format(f"--{flag} {place}", args)


def _require_client(given: str, place: str, args: Any) -> None:
    if not place.startswith("msc://"):
        raise UsageError(
            f"{given} must be a directory, or an address of the form msc://PROFILE/… for NVIDIA's "
            "multi-storage-client. "
            f"{_MOUNT}"
        )
    module = sys.modules.get("megatron.core.msc_utils")
    if module is None:
        raise UsageError(
            f"{given} requires a version of Megatron that supports msc:// (megatron-core 0.13 or "
            f"later). {_MOUNT}"
        )
    if hasattr(args, "disable_msc_deprecated") and not args.enable_msc:  # 0.18 and newer
        raise UsageError(
            f"{given} requires --enable-msc, because this Megatron opens addresses only with that flag. "
            "Add --enable-msc, and do not pass --disable-msc."
        )
    if not module.MultiStorageClientFeature.is_enabled():
        raise UsageError(
            f"{given} requires the multi-storage-client package, and --disable-msc must not be given. "
            "Install the package with the extra for your storage backend: pip install "
            "multi-storage-client[boto3]."
        )


def _require_format(given: str, args: Any) -> None:
    if args.ckpt_format != "torch_dist":
        raise UsageError(
            f"{given} cannot be used with --ckpt-format {args.ckpt_format}, because upstream writes only "
            "the torch_dist format to msc:// addresses. Use --ckpt-format torch_dist."
        )
    for name in _OURS:
        if getattr(args, name, False):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{given} cannot be used with {flag}, which requires a directory. Remove {flag}."
            )


def declare_whole(place: str) -> None:
    """Write the marker object of a complete checkpoint. All ranks must call this."""
    import multistorageclient

    if dist.is_initialized():
        dist.barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        with multistorageclient.open(f"{place.rstrip('/')}/{MARK}", "w") as stream:
            stream.write("")
