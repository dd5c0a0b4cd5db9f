"""Options that cannot work end in one line, before a model is built."""

from __future__ import annotations

import argparse
import contextlib
import json

import pytest

from megatron_npu import devices
from megatron_npu.adaptors.deepspeed.deepspeed_engine import refuse_other_models
from megatron_npu.adaptors.deepspeed.flags_and_runs import refuse_flags_of_other_trees
from megatron_npu.adaptors.deepspeed.megatron_deepspeed import unsupported_options
from megatron_npu.base.errors import UsageError


def arguments(**changes: object) -> argparse.Namespace:
    given = {"cpu_optimizer": False, "universal_checkpoint": False, "deepspeed": True, "zero_stage": 1.0}
    return argparse.Namespace(**{**given, **changes})


@pytest.mark.parametrize(
    ("text", "zero_stage", "message"),
    [
        (None, 1.0, "does not exist"),
        ("{", 1.0, "Expecting property name"),
        ("[]", 1.0, "must be a file with a JSON object, but .* contains a list"),
        ('{"zero_optimization": {"stage": 2}}', 1.0, "ZeRO stage 2"),
        ("{}", 3, "ZeRO stage 3"),
        ('{"fp16": {"enabled": true}}', 1.0, "fp16 cannot be used with --deepspeed on a CPU"),
    ],
)
def test_configurations_that_cannot_work(tmp_path, monkeypatch, text, zero_stage, message):
    monkeypatch.setattr(devices, "current", lambda: argparse.Namespace(name="cpu"))
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        unsupported_options.refuse(arguments(deepspeed_config=str(path), zero_stage=zero_stage))


def test_flags_that_cannot_work(tmp_path):
    with pytest.raises(
        UsageError, match="--deepspeed_config must be a file with a JSON object, but None does not exist"
    ):
        unsupported_options.refuse(arguments(deepspeed_config=None))
    with pytest.raises(UsageError, match="--cpu-optimizer is declared but not implemented in this checkout"):
        unsupported_options.refuse(arguments(cpu_optimizer=True))
    with pytest.raises(UsageError, match=r"--universal-checkpoint.*ds_to_universal\.py"):
        unsupported_options.refuse(arguments(universal_checkpoint=True))


@pytest.mark.parametrize("flag", ["--swap-optimizer", "--cross-entropy-fusion-impl=linear"])
def test_flags_of_ours_for_other_trees(flag):
    with pytest.raises(UsageError, match=f"{flag.partition('=')[0]} is not supported by Megatron-DeepSpeed"):
        refuse_flags_of_other_trees(["--num-layers", "2", flag])
    refuse_flags_of_other_trees(["--num-layers", "2", "--cross-entropy-fusion"])


def test_a_stage_of_two_is_all_that_is_wrong_and_only_with_deepspeed(tmp_path):
    path = tmp_path / "ds.json"

    def refused(stage, **changes):
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}))
        given = arguments(deepspeed_config=str(path), **changes)
        before = vars(given).copy()
        try:
            unsupported_options.refuse(given)
        except UsageError:
            return True
        assert vars(given) == before
        return False

    assert [refused(stage) for stage in (0, 1, 2, 3)] == [False, False, True, True]
    assert not refused(2, deepspeed=False)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({}, "Remove --deepspeed"), ({"ds_pipeline_enabled": True}, "Add --no-pipeline-parallel")],
    ids=["bigscience", "deepspeedai"],
)
def test_the_engine_takes_a_pipeline(options, remedy):
    given = argparse.Namespace(**options)
    refuse_other_models(given, pipeline=True)
    with pytest.raises(UsageError, match=f"models such as BERT and T5 as a pipeline.*{remedy}"):
        refuse_other_models(given, pipeline=False)


def test_an_engine_without_pipelines_takes_all():
    taken = []
    for enabled, pipeline in [(True, True), (False, True), (False, False), (True, False)]:
        with contextlib.suppress(UsageError):
            refuse_other_models(argparse.Namespace(ds_pipeline_enabled=enabled), pipeline=pipeline)
            taken.append((enabled, pipeline))
    assert taken == [(True, True), (False, True), (False, False)]
