"""Options that cannot work end in one line, before a model is built."""

from __future__ import annotations

import argparse
import contextlib

import pytest

from megatron_npu import devices
from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core import unsupported_options
from megatron_npu.base.errors import UsageError


def arguments(**changes: object) -> argparse.Namespace:
    given = {"deepspeed": True, "no_pipeline_parallel": False, "ds_sequence_parallel_fpdt": False}
    given["apply_layernorm_1p"] = False
    given |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    given |= {"ds_sequence_parallel_size": 1, "use_rotary_position_embeddings": False}
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


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("npu", True), ("cuda", False)])
def test_weights_around_zero_of_a_layer_norm_are_of_cuda(monkeypatch, device, refused):
    monkeypatch.setattr(devices, "current", lambda: argparse.Namespace(name=device))
    given = arguments(deepspeed=False, apply_layernorm_1p=True)
    with pytest.raises(UsageError, match="--apply-layernorm-1p") if refused else contextlib.nullcontext():
        unsupported_options.refuse(given)


def test_ranks_of_a_sequence_need_the_engine_and_no_pipeline(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text("{}")
    whole = {"deepspeed_config": str(path), "zero_stage": 1, "no_pipeline_parallel": True}
    given = {**whole, "ds_sequence_parallel_size": 2}
    unsupported_options.refuse(arguments(**given))
    for name in ("deepspeed", "no_pipeline_parallel"):
        with pytest.raises(UsageError, match="requires both --deepspeed and --no-pipeline-parallel"):
            unsupported_options.refuse(arguments(**given | {name: False}))
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        with pytest.raises(
            UsageError, match="-parallel-size 2 cannot be combined with --tensor-model-parallel-size"
        ):
            unsupported_options.refuse(arguments(**given | {name: 2}))
    with pytest.raises(UsageError, match=r"averages the gradients.*reduce_scatter"):
        unsupported_options.refuse(arguments(**given | {"zero_stage": 3}))
    path.write_text('{"zero_optimization": {"stage": 3, "reduce_scatter": false}}')
    unsupported_options.refuse(arguments(**given))


def test_rotary_embedding_that_upstream_has_wrong(tmp_path, monkeypatch):
    path = tmp_path / "ds.json"
    path.write_text("{}")
    given = {"deepspeed_config": str(path), "zero_stage": 1, "use_rotary_position_embeddings": True}
    whole = {**given, "no_pipeline_parallel": True}
    unsupported_options.refuse(arguments(**whole))
    refused = [(given, "DeepSpeed's pipeline"), ({**whole, "ds_sequence_parallel_size": 2}, "--ds-sequence")]
    for options, told in refused:
        with pytest.raises(UsageError, match=rf"rotary.* with {told}.*MEGATRON_NPU_BACKPORT=1"):
            unsupported_options.refuse(arguments(**options))
    monkeypatch.setenv("MEGATRON_NPU_BACKPORT", "1")
    for options, _ in refused:
        unsupported_options.refuse(arguments(**options))
