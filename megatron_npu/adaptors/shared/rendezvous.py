"""Provide a rendezvous address for a run that was started without a launcher."""

from __future__ import annotations

import os


def provide_address() -> None:
    """Set a store address for a single process, as torchrun does for several processes.

    Stock scripts call ``init_process_group`` with ``env://``. Without a launcher, this call would fail
    because MASTER_ADDR is missing. Most versions offer no way to pass a store (megatron-core 0.16 does), so
    the address is set instead. With port 0, the system chooses a free port when torch's store binds it, and
    no other process needs to know the port.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" and "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.setdefault("MASTER_PORT", "0")
