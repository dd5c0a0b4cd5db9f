"""Patch ``megatron.data`` of the older checkouts to build index files without a compiler.

Index files are read without pickle. Dataset files are private to their user and group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.shared import private_files
from megatron_npu.adaptors.shared.start import compile_no_helpers
from megatron_npu.patching.registry import Recorder
from megatron_npu.safe_files import lazy_index, safe_numpy, safe_pickle

WHY_EMBEDDINGS = "upstream unpickles the embeddings of REALM's blocks, which executes any code in the file"


def connect(recorder: Recorder, modules: tuple[str, ...], until: str) -> None:
    """Record the patches for index files.

    Args:
        recorder: the checkout's recorder.
        modules: the modules of ``megatron.data`` that read index files.
        until: the condition under which the fixes may be removed.
    """
    for module in modules:
        recorder.constant(
            f"megatron.data.{module}:np",
            safe_numpy,
            why="upstream loads index files with allow_pickle=True, which executes any code in them, and "
            "writes them in place",
            upstream_bug=True,
            until=until,
        )
    recorder.constant(
        "megatron.data.realm_index:pickle",
        safe_pickle,
        why=WHY_EMBEDDINGS,
        upstream_bug=True,
        until=until,
    )
    recorder.replace(
        "megatron.data.dataset_utils:compile_helper",
        why=(
            "upstream runs make inside the checkout, for the first python3 on the path, and exits if that"
            " fails; megatron.data.helpers is already compiled, or a stub"
        ),
    )(compile_no_helpers)
    module = "megatron.data.indexed_dataset"
    private_files.keep_datasets(recorder, module, "IndexedDatasetBuilder", "MMapIndexedDatasetBuilder")
    recorder.around(f"{module}:make_dataset", why=_WHY_LAZY)(through_a_map)
    recorder.around(f"{module}:MMapIndexedDataset.Index.__init__", why=_WHY_LAZY)(read_either)


_WHY_LAZY = (
    "upstream writes and opens datasets of --data-impl lazy and cached but cannot train on them: "
    "its samplers need 32-bit sizes and parts of a sequence, which its readers for these formats do "
    "not provide"
)


def through_a_map(original: Callable[..., Any], path: str, impl: str, *args: Any, **kwargs: Any) -> Any:
    """Open a dataset that is requested as ``lazy`` or ``cached`` as an ``mmap`` dataset."""
    lazy = impl in ("lazy", "cached", "infer") and lazy_index.is_lazy(f"{path}.idx")
    return original(path, "mmap" if lazy else impl, *args, **kwargs)


def read_either(original: Callable[..., None], self: Any, path: str, *args: Any, **kwargs: Any) -> None:
    """Read a ``lazy`` or ``cached`` index as the equivalent ``mmap`` index."""
    with lazy_index.mapped(path) as mapped:
        original(self, mapped, *args, **kwargs)
