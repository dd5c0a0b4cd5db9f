"""Default rendezvous address for a run started without a launcher."""

from __future__ import annotations

import os


def provide_address() -> None:
    """Set a store address for a single process, as torchrun does for several.

    Stock scripts call ``init_process_group`` with ``env://``; without a launcher they would fail there
    because MASTER_ADDR is missing. Most versions offer no way to pass a store (megatron-core 0.16 does), so
    the address is set instead: with port 0 the system chooses a free one when torch's store binds it, and no
    other process needs to know it.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" and "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.setdefault("MASTER_PORT", "0")
