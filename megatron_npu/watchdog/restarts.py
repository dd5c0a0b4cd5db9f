"""Support ``torchrun --max-restarts`` by detecting addresses that an earlier attempt left in a store."""

from __future__ import annotations

import os

from megatron_npu.base.errors import UsageError

_REMEDY = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def require_fresh_store() -> None:
    """Check that a rank restarted by torchrun does not use the store of an earlier attempt.

    By default, torchrun keeps the store (torch 2.5 to 2.13 at least, pytorch#135712), with the addresses of
    dead processes: a rank that reads these before they are overwritten waits or fails. Only the c10d
    rendezvous reads the variable; the static one (``--master-addr``) always keeps its store.

    Raises:
        UsageError: the store belongs to an earlier attempt.
    """
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UsageError(
            "torchrun restarted this run with the store of the previous attempt, which contains addresses "
            f"of dead processes; restarts require {_REMEDY}=1 in torchrun's environment and, in place of "
            "--master-addr and --master-port, --rdzv-backend c10d --rdzv-endpoint HOST:PORT",
            remedy="Set both and start the run again; with --load it resumes from its last checkpoint.",
        )


def attempt() -> str:
    """Return an identifier of this attempt in the store, which is the same on all ranks.

    If torchrun's agent shares its store, the store survives restarts, and all agents count restarts alike. If
    each attempt has its own store, no identifier is needed, and the counts differ: a machine that joined
    later (``--nnodes 1:2``) counts from 0.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "0"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
