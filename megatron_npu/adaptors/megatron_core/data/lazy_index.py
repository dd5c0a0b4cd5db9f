"""``megatron.core.datasets.indexed_dataset``: read older Megatron's ``lazy`` and ``cached`` indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.safe_files import lazy_index


@around(
    "megatron.core.datasets.indexed_dataset:_IndexReader.__init__",
    why="datasets of --dataset-impl lazy or cached, of Megatron-LM until 2023, are a bad header to it",
)
def read_either(original: Callable[..., None], self: Any, idx_path: str, *args: Any, **kwargs: Any) -> None:
    """Read a ``lazy`` or ``cached`` index as the equivalent index in the current format."""
    with lazy_index.mapped(idx_path) as path:
        original(self, path, *args, **kwargs)
