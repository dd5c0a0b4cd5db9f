"""Stand-in for ``mcore_bridge.model.modules.kernels.qsa_block_sparse_attn`` without the package triton.

mcore-bridge 1.6.5 imports it always, for the sparse attention of one family of models (qwen4_exp). Beside it
the library asks whether there is triton, and takes the same attention with a mask where there is none.
"""

from __future__ import annotations

from typing import Any, NoReturn

from megatron_npu.base.errors import UsageError


def qsa_sparse_attention_from_indices(*_: Any, **__: Any) -> NoReturn:
    """Stand for a kernel of Triton's, which nobody here has.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "mcore-bridge's sparse attention kernel without the package triton",
        "its attention with a mask",
        "Set QSA_SPARSE_KERNEL=0.",
    )
