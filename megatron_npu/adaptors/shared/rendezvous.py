"""Default rendezvous address of a run started without a launcher."""

from __future__ import annotations

import os


def provide_address() -> None:
    """Give a process that is alone the address of its store, which torchrun gives to several.

    Stock scripts call ``init_process_group`` with ``env://``; without a launcher they would end there, asking
    for MASTER_ADDR. Most versions offer no way to hand them a store (megatron-core 0.16 does), so it is the
    address that is given: with port 0 the system chooses a free one as torch's store binds it, and nobody
    else needs to know which.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" and "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.setdefault("MASTER_PORT", "0")
