"""Stub for the generation kernels of megatron-core's state space layers, used without triton.

Mamba layers and gated delta nets import it; they can train without it.
"""

from __future__ import annotations

from typing import Any, NoReturn


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Reject generation.

    Raises:
        RuntimeError: always: the kernels are written in triton.
    """
    raise RuntimeError(
        "layers of state spaces need the package triton to generate from packed sequences, and for "
        "--batch-invariant-mode; it is not installed"
    )


# ssm.ops.common.causal_conv1d_varlen
causal_conv1d_varlen_fn = causal_conv1d_varlen_carry_states = _refuse
# ssm.ops.mamba2.batch_invariant_decode
MambaBatchInvariantDecode = _refuse
