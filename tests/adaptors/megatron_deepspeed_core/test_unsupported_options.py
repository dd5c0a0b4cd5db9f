"""Options that cannot work end in one line, before a model is built."""

from __future__ import annotations

import argparse

import pytest

from megatron_npu.adaptors.megatron_deepspeed_core import unsupported_options
from megatron_npu.errors import UsageError


def arguments(**changes: object) -> argparse.Namespace:
    given = {"deepspeed": True, "no_pipeline_parallel": False, "ds_sequence_parallel_fpdt": False}
    return argparse.Namespace(**{**given, **changes})


def test_a_pipeline_has_no_stage_2(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    given = {"deepspeed_config": str(path), "zero_stage": 2}
    with pytest.raises(UsageError, match=r"ZeRO stage 2.*--no-pipeline-parallel"):
        unsupported_options.refuse(arguments(**given))
    unsupported_options.refuse(arguments(**given, no_pipeline_parallel=True))


def test_attention_in_chunks_of_flash_attn():
    with pytest.raises(UsageError, match="--ds-sequence-parallel-fpdt"):
        unsupported_options.refuse(arguments(deepspeed=False, ds_sequence_parallel_fpdt=True))
