"""Stub for megatron-core's kernels for generation with state-space layers, used without triton.

Mamba layers and gated delta nets import these kernels, but can be trained without them.
"""

from __future__ import annotations

from typing import Any, NoReturn


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Reject generation, because its kernels require triton.

    Raises:
        RuntimeError: always, because the kernels are written in triton.
    """
    raise RuntimeError(
        "state-space layers require the package triton, which is not installed, to generate from packed "
        "sequences and for --batch-invariant-mode"
    )


# ssm.ops.common.causal_conv1d_varlen
causal_conv1d_varlen_fn = causal_conv1d_varlen_carry_states = _refuse
# ssm.ops.mamba2.batch_invariant_decode
MambaBatchInvariantDecode = _refuse
