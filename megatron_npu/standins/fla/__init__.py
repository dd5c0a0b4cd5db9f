"""What Megatron's gated delta nets take from flash-linear-attention (``fla``), where that package is absent.

Its kernels are Triton's; here the same is plain torch. They stand beside the layers under TransformerEngine's
names, which a gated delta net is made of: where ``MEGATRON_NPU_TE=local`` asks for them. States of generation
are refused.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from megatron_npu.base.errors import UsageError

__version__ = "0.0+megatron.npu"  # Transformers takes other names of it from 0.2.2 on


def refuse_states(initial_state: Any, output_final_state: bool) -> None:
    """Raise UsageError if a text is continued from a state."""
    if initial_state is not None or output_final_state:
        raise UsageError(
            "the state of a gated delta net without the package flash-linear-attention",
            "training or generation on whole sequences",
            "Disable the inference cache.",
        )


def lengths_of(cu_seqlens: Tensor | None, steps: int) -> list[int]:
    """Return the lengths of the packed sequences, whose first places and end ``cu_seqlens`` ``[n + 1]`` has.

    They are read on the host, once for each call. What stands after the last sequence is one more.
    """
    if cu_seqlens is None:
        return [steps]
    places = cu_seqlens.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(places)]
    return [length for length in [*lengths, steps - places[-1]] if length]
