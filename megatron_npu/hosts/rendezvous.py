"""Where the processes of a run meet, when no launcher has said so."""

from __future__ import annotations

import os
import socket


def provide_address() -> None:
    """Give a process that is alone the address of its store, which torchrun gives to several.

    Both hosts call ``init_process_group`` with ``env://``; ``python pretrain_gpt.py`` without a launcher
    would end there, asking for MASTER_ADDR.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" and "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.setdefault("MASTER_PORT", str(_free_port()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
