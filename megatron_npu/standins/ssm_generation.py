"""Stand-in for what megatron-core's layers of state spaces generate with, where triton is absent.

Mamba layers and gated delta products import it; they train without.
"""

from __future__ import annotations

from typing import Any, NoReturn


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Refuse.

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
