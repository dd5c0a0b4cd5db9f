"""``megatron.data``: index files of datasets, built without a compiler and read without pickle."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_deepspeed.decorators import constant, replace
from megatron_npu.adaptors.shared import safe_numpy
from megatron_npu.adaptors.shared.start import compile_no_helpers

for _module in ("gpt_dataset", "dataset_utils"):
    constant(
        f"megatron.data.{_module}:np",
        safe_numpy,
        why="upstream loads index files with allow_pickle=True, which runs whatever code they hold, and "
        "writes them in place",
        upstream_bug=True,
        until="8387ae17 is its last commit: for ever",
    )

replace(
    "megatron.data.dataset_utils:compile_helper",
    why="it runs make inside the checkout, for whichever python3 is first on the path, and ends the process "
    "if that fails; megatron.data.helpers is Python here",
)(compile_no_helpers)
