"""The switches of acceleration in `pretrain`: the flags of Megatron that they are, and what is refused."""

from __future__ import annotations

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.options import switch_rules
from megatron_npu.options.switch_rules import Place
from megatron_npu.options.switches import Switches
from megatron_npu.pretrain.flags import arguments, validation
from megatron_npu.pretrain.flags.checks import switches


@pytest.fixture
def check(flags, monkeypatch):
    """Return a function: flags to add, number of processes -> the checked flags."""

    def checked(changes: str, processes: int = 2):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        return validation.check(arguments.parse(flags(*changes.split())))

    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    return checked


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("--mixed-precision", {"bf16": True, "accumulate_allreduce_grads_in_fp32": True}),
        ("--mixed-precision fp16", {"fp16": True, "bf16": False}),
        ("--zero-1-memory-optimization", {"use_distributed_optimizer": True, "fully_sharded": None}),
        (
            "--zero-1-memory-optimization --overlap-grad-reduce --overlap-param-gather",
            {"use_distributed_optimizer": True},
        ),
        ("--zero-2-memory-optimization", {"fully_sharded": "megatron", "fsdp_strategy": "optim_grads"}),
        ("--zero-3-memory-optimization", {"fsdp_strategy": "optim_grads_params"}),
        ("--fsdp-memory-optimization", {"fully_sharded": "torch", "use_distributed_optimizer": False}),
        (
            "--checkpoint-activations",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
    ],
)
def test_a_switch_is_flags_of_megatron(check, given, wanted):
    args = check(given)
    assert {name: getattr(args, name) for name in wanted} == wanted


def test_zero_2_of_a_pipeline_says_what_is_shared_out(check, capsys):
    args = check("--zero-2-memory-optimization --pipeline-model-parallel-size 2", 4)
    assert (args.use_distributed_optimizer, args.fully_sharded) == (True, None)
    said = capsys.readouterr().out
    assert "Adam's states and the fp32 main weights are sharded over 2 data-parallel rank(s)" in said
    assert "each rank keeps the full gradients of its part of the model" in said


def test_one_rank_has_nothing_to_share_out(check, capsys):
    for stage in ("zero-2", "zero-3", "fsdp"):
        args = check(f"--{stage}-memory-optimization", 1)
        assert (args.fully_sharded, args.use_distributed_optimizer) == (None, False)
        assert "one data-parallel rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--mixed-precision --fp16", "--mixed-precision bf16 and --fp16"),
        ("--zero-1-memory-optimization --fsdp-memory-optimization", "are mutually exclusive"),
        ("--zero-3-memory-optimization --tensor-model-parallel-size 2", "data parallelism only"),
        ("--fsdp-memory-optimization --pipeline-model-parallel-size 2", "data parallelism only"),
        ("--fsdp-memory-optimization --context-parallel-size 2", "data parallelism only"),
        ("--zero-3-memory-optimization --fp16", "in fp16 for a Megatron model"),
        ("--fsdp-memory-optimization --mixed-precision fp16", "in fp16 for a Megatron model"),
        ("--fsdp-memory-optimization --use-distributed-optimizer", "and --use-distributed-optimizer"),
        ("--zero-3-memory-optimization --overlap-grad-reduce", "FSDP always overlaps communication"),
        (
            "--zero-3-memory-optimization --num-experts 4",
            "--num-experts cannot be used with --zero-3-memory-optimization",
        ),
        ("--cpu-offload", "on the cpu device"),
        ("--graph-optimization", "--graph-optimization for a Megatron model"),
        ("--dynamic-shape", "--dynamic-shape for a Megatron model"),
        ("--lora-rank 4", "--lora-rank for a Megatron model"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_built(check, given, said):
    with pytest.raises(UsageError, match=said):
        check(given, 4 if "parallel-size" in given else 2)


def test_the_documents_word_for_graphs_is_what_megatron_s_layers_have(check, capsys):
    check("--onnx-runtime-training", 2)
    said = "--onnx-runtime-training has no effect, because Megatron's layers already use fused operations"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("one", switch_rules.WORDS, ids=lambda word: word.flag)
def test_every_pair_is_refused_by_the_rules_or_trains(check, one):
    """The rules are what is checked, all of it, and before anything is built; the parser has some, too."""
    for other in switch_rules.WORDS:
        if other.name == one.name:
            continue
        both = Switches(**{one.name: one.value, other.name: other.value})
        expected = switch_rules.refusal_of(both, Place("megatron", "cpu"))
        given = " ".join(
            word.flag if word.value in (True, "bf16", "fp16") or word.name == "sharding" else f"{word.flag} 8"
            for word in (one, other)
        )
        if expected is None:
            check(given)
            continue
        with pytest.raises(UsageError) as error:
            check(given)
        assert expected.expected in str(error.value), given


@pytest.mark.parametrize("stage", ["zero-2", "zero-3"])
def test_an_older_core_has_no_fsdp_that_can_be_used(check, monkeypatch, stage):
    monkeypatch.setattr(switches, "_FIRST_FSDP", (0, 17))
    with pytest.raises(
        UsageError, match=f"--{stage}-memory-optimization cannot be used with megatron-core 0.16.1"
    ):
        check(f"--{stage}-memory-optimization")
