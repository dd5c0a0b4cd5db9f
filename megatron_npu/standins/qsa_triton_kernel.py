"""Stub for ``mcore_bridge.model.modules.kernels.qsa_block_sparse_attn``, used without the package triton.

mcore-bridge 1.6.5 always imports it, for the sparse attention of one family of models (qwen4_exp). The
library also checks whether triton is installed, and otherwise computes the same attention with a mask.
"""

from __future__ import annotations

from typing import Any, NoReturn

from megatron_npu.base.errors import UsageError


def qsa_sparse_attention_from_indices(*_: Any, **__: Any) -> NoReturn:
    """Reject the call: Triton kernels are not available here.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "mcore-bridge's sparse attention kernel without the package triton",
        "its attention with a mask",
        "Set QSA_SPARSE_KERNEL=0.",
    )
