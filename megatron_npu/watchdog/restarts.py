"""``torchrun --max-restarts``: what the ranks of a second attempt find in the store of the first."""

from __future__ import annotations

import os

from megatron_npu.base.errors import UsageError

_REMEDY = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def require_fresh_store() -> None:
    """Check that a rank that torchrun has restarted meets the others at a store of its own attempt.

    By default the store lives on in torchrun (c10d rendezvous; torch 2.5 to 2.13 at least, pytorch#135712),
    with the addresses of processes that are dead: who reads them before they are written again connects to
    nobody, and waits, or fails.

    Raises:
        UsageError: it does not.
    """
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UsageError(
            "torchrun has restarted this run with the store of the attempt before, which holds the addresses "
            "of processes that are dead",
            f"{_REMEDY}=1 in torchrun's environment",
            "Set it and start again; with --load the run resumes from its last checkpoint.",
        )


def attempt() -> str:
    """Return what tells the attempts of a run apart in the store of the run, the same on all its ranks.

    Where torchrun's agent shares its store, that lives on, and all agents count restarts alike. Where each
    attempt has a store of its own there is nothing to tell apart, and the counts differ: a machine that
    joined later (``--nnodes 1:2``) has counted none.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "0"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
