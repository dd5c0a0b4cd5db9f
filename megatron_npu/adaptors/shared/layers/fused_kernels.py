"""Support modules whose constructors import CUDA extensions that this package does not use."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_NORM = "fused_mix_prec_layer_norm_cuda"


def initialise_without_kernel(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Run ``MixedFusedLayerNorm.__init__`` with a placeholder for the CUDA extension that it imports."""
    with _importable(_NORM):
        original(self, *args, **kwargs)


@contextlib.contextmanager
def _importable(name: str) -> Iterator[None]:
    absent = name not in sys.modules
    if absent:
        sys.modules[name] = ModuleType(name, "Empty, because layer norm is an operation of megatron_npu.")
    try:
        yield
    finally:
        if absent:
            del sys.modules[name]
