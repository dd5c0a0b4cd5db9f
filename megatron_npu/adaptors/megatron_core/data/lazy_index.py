"""``megatron.core.datasets.indexed_dataset``: indices of ``lazy`` and ``cached``, of older Megatrons."""

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
    """Read an index of ``lazy`` or ``cached`` as the one of today that says the same."""
    with lazy_index.mapped(idx_path) as path:
        original(self, path, *args, **kwargs)
