"""``megatron.data`` of the older trees: index files built without a compiler and read without pickle.

Datasets are their user's and his group's.
"""

from __future__ import annotations

from megatron_npu.adaptors.shared import private_files
from megatron_npu.adaptors.shared.start import compile_no_helpers
from megatron_npu.patching.registry import Recorder
from megatron_npu.safe_files import safe_numpy, safe_pickle

WHY_EMBEDDINGS = (
    "upstream unpickles the embeddings of REALM's blocks, which runs whatever code the file holds"
)


def connect(recorder: Recorder, modules: tuple[str, ...], until: str) -> None:
    """Record all of it.

    Args:
        recorder: that of the tree.
        modules: those of ``megatron.data`` that read index files.
        until: when the first may be removed.
    """
    for module in modules:
        recorder.constant(
            f"megatron.data.{module}:np",
            safe_numpy,
            why="upstream loads index files with allow_pickle=True, which runs whatever code they hold, and "
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
        why="it runs make inside the checkout, for whichever python3 is first on the path, and ends the "
        "process if that fails; megatron.data.helpers is compiled already or a stand-in",
    )(compile_no_helpers)
    private_files.keep_datasets(
        recorder, "megatron.data.indexed_dataset", "IndexedDatasetBuilder", "MMapIndexedDatasetBuilder"
    )
