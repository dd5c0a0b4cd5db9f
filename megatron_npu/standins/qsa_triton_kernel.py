"""Stub for ``mcore_bridge.model.modules.kernels.qsa_block_sparse_attn``, used if triton is not installed.

mcore-bridge 1.6.5 always imports this module, for the sparse attention of one family of models (qwen4_exp).
The library also checks whether triton is installed, and otherwise computes the same attention with a mask.
"""

from __future__ import annotations

from typing import Any, NoReturn

from megatron_npu.base.errors import UsageError


def qsa_sparse_attention_from_indices(*_: Any, **__: Any) -> NoReturn:
    """Reject the call, because Triton kernels are not available in this process.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "mcore-bridge's sparse attention kernel requires triton, which is not installed. Set "
        "QSA_SPARSE_KERNEL=0 to use its masked attention instead."
    )
