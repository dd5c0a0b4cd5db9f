"""``megatron.core.models.mamba.mamba_model``: models of state spaces, and hybrids."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import installed, wrap
from megatron_npu.errors import UsageError


@wrap(
    "megatron.core.models.mamba.mamba_model:MambaModel.__init__",
    condition=partial(installed, "mamba_ssm"),
    why="its layers are mamba_ssm's kernels, which are CUDA's: without the package an AttributeError of None "
    "or an ImportError in the middle of the model, by version",
)
def refuse_without_mamba_ssm(original: Callable[..., None]) -> Callable[..., None]:
    """Refuse before anything is built."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        raise UsageError(
            "a Mamba model without the packages mamba-ssm and causal-conv1d, which are for CUDA",
            "a model whose layers there are kernels for",
            "Train a transformer (pretrain_gpt.py), or use CUDA and install them.",
        )

    return __init__
