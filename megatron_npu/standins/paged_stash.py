"""Stub for megatron-core's ``moe.paged_stash``, used without triton, which never stashes any tensor.

Upstream calls these functions only with ``--moe-paged-stash`` and ``--moe-expert-rank-capacity-factor``,
which are rejected when a model is configured (``adaptors.megatron_core.unsupported_options``).
"""

from __future__ import annotations

from typing import Any, NoReturn


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Reject every call, because triton is not installed.

    Raises:
        RuntimeError: always, because the kernels are written in triton.
    """
    raise RuntimeError("--moe-paged-stash requires the package triton, which is not installed")


get_paged_stash_context = paged_stash_group_start = paged_stash_group_commit = _refuse
paged_stash_init_chunk_handler = paged_stash_reset = _refuse
check_paged_stash_overflow = check_paged_stash_host_spill = PagedStashRunner = PagedStashManager = _refuse
