"""One device of gloo for all process groups of one rank.

By default, each group has its own, whose thread wakes a hundred times per second: Megatron makes 20 to 50
groups in each rank, most of them of one rank, which never send anything. Groups of more ranks keep a device
of their own: with a shared one, collectives of eight ranks hung.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

INTERFACES = "GLOO_SOCKET_IFNAME"  # names the devices: they are then torch's own
_MARK = "shares_one_device"


def share() -> None:
    """Make groups of one rank that ``torch.distributed`` makes take the device of the first of them."""
    from torch.distributed import distributed_c10d

    own: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if own is None or hasattr(own, _MARK):  # built without gloo; a parent that is a fork of a parent
        return
    devices: dict[int, Any] = {}  # by process: its thread does not outlive a fork

    class Sharing(type):
        def __call__(
            cls, store: object, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)
        ) -> Any:
            if size > 1 or os.environ.get(INTERFACES):
                return own(store, rank, size, timeout=timeout)
            if os.getpid() not in devices:
                devices[os.getpid()] = own.create_default_device()
            options = own._Options()
            options._devices, options._threads, options._timeout = [devices[os.getpid()]], 1, timeout
            return own(store, rank, size, options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, own)

        def __getattr__(cls, name: str) -> Any:
            return getattr(own, name)

    vars(distributed_c10d)["ProcessGroupGloo"] = Sharing("ProcessGroupGloo", (), {_MARK: True})
