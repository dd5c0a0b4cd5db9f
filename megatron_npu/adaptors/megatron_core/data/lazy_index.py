"""Patch ``megatron.core.datasets.indexed_dataset`` to read ``lazy`` and ``cached`` indices.

Older versions of Megatron wrote these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.safe_files import lazy_index


@around(
    "megatron.core.datasets.indexed_dataset:_IndexReader.__init__",
    why=(
        "upstream rejects the header of datasets created with --dataset-impl lazy or cached, which "
        "Megatron-LM wrote until 2023"
    ),
)
def read_either(original: Callable[..., None], self: Any, idx_path: str, *args: Any, **kwargs: Any) -> None:
    """Read a ``lazy`` or ``cached`` index as the equivalent index in the current format."""
    with lazy_index.mapped(idx_path) as path:
        original(self, path, *args, **kwargs)
