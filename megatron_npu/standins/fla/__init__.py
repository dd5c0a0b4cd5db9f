"""What Megatron's gated delta nets import from flash-linear-attention (``fla``) if that package is absent.

Its kernels are written in Triton; here the same is computed in plain torch. The stub is installed with
``MEGATRON_NPU_TE=local``, together with the layers under TransformerEngine's names, on which a gated delta
net is built. Generation from a state is rejected.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from megatron_npu.base.errors import UsageError

__version__ = "0.0+megatron.npu"  # Transformers takes other names of it from 0.2.2 on


def refuse_states(initial_state: Any, output_final_state: bool) -> None:
    """Raise a UsageError if generation from a state is requested."""
    if initial_state is not None or output_final_state:
        raise UsageError(
            "the state of a gated delta net without the package flash-linear-attention",
            "training or generation on whole sequences",
            "Disable the inference cache.",
        )


def lengths_of(cu_seqlens: Tensor | None, steps: int) -> list[int]:
    """Return the lengths of the packed sequences whose boundaries are in ``cu_seqlens`` ``[n + 1]``.

    They are read on the host, once per call. Tokens after the last sequence count as one more sequence.
    """
    if cu_seqlens is None:
        return [steps]
    places = cu_seqlens.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(places)]
    return [length for length in [*lengths, steps - places[-1]] if length]
