"""Stub for the parts of flash-linear-attention (``fla``) that Megatron's gated delta nets import.

The kernels of ``fla`` are written in Triton; here, the same results are computed in plain torch. The stub is
installed with ``MEGATRON_NPU_TE=local`` if the package is not installed, together with the layers under
TransformerEngine's names, which a gated delta net is built on. Generation from a state is rejected.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from megatron_npu.base.errors import UsageError

__version__ = "0.0+megatron.npu"  # Transformers takes other names of it from 0.2.2 on


def refuse_states(initial_state: Any, output_final_state: bool) -> None:
    """Check that the caller does not request generation from an initial state.

    Raises:
        UsageError: generation from a state is requested.
    """
    if initial_state is not None or output_final_state:
        raise UsageError(
            "continuing a gated delta net from a state requires flash-linear-attention, which is not "
            "installed; only training and generation on whole sequences are supported without it. Disable "
            "the inference cache."
        )


def lengths_of(cu_seqlens: Tensor | None, steps: int) -> list[int]:
    """Return the lengths of packed sequences, given their boundaries ``cu_seqlens`` ``[n + 1]``.

    The boundaries are read on the host, once per call. Tokens after the last sequence count as one more
    sequence.
    """
    if cu_seqlens is None:
        return [steps]
    places = cu_seqlens.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(places)]
    return [length for length in [*lengths, steps - places[-1]] if length]
