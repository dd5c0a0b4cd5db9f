"""Training 2N iterations is training N, ending, and N more: to the bit, with dropout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from tests.support import curves, tiny

pytest.importorskip("megatron.core")


# A checkpoint that is cut for another data-parallel size has uninitialised padding between parameters, so
# the last ones are saved in the other form, in which every number counts.
LAST = "--dist-ckpt-optim-fully-reshardable"


LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 8 --position-embedding-type rope --mtp-num-layers 1"
)


@pytest.mark.parametrize(
    "kind",
    [
        [],
        ["--bf16", "--use-distributed-optimizer"],
        ["--fp16", "--initial-loss-scale", "65536"],
        ["--use-distributed-optimizer", LAST],
        [*LATENT.split(), *"--async-save --save-interval 1 --sample-tokens 3 --sample-prompt 1".split()],
    ],
    ids=["fp32", "bf16-distributed", "fp16", "reshardable", "latent-predicting-asynchronous"],
)
def test_one_process(train, tmp_path, kind):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    common = ("--eval-interval", 2, "--no-plot", *kind)
    train("--save", whole, *common, LAST)
    first = train("--save", halves, "--load", halves, "--exit-interval", 3, *common)
    assert (first.iterations, first.ended_by) == (3, "exit-interval")
    second = train("--save", halves, "--load", halves, *common, LAST)
    assert (second.iterations, second.consumed_samples) == (6, 24)
    _same(whole, halves)


FSDP = "--fsdp-memory-optimization --swiglu"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
WIDER = f"--finetune {NO_DROPOUT} --make-vocab-size-divisible-by 300 --train-iters 1 --eval-iters 0"
KINDS = {
    "plain": "",
    "distributed": "--use-distributed-optimizer",
    "fsdp": f"{FSDP} --bf16",
    "zero-2": "--zero-2-memory-optimization --bf16",
    "zero-3": "--zero-3-memory-optimization --swiglu",
}


def saving(folder: Path, *words: str) -> str:
    """Return the flags of a run that saves into a folder and goes on with what is there."""
    return " ".join([f"--save {folder} --load {folder} --json-log {folder / 'metrics.jsonl'}", *words])


@pytest.fixture(scope="module")
def of_two(dataset, tmp_path_factory) -> Path:
    """A folder with the runs of two processes: KIND-whole, and KIND-halves of two starts.

    And of the fully sharded: ``start`` and, of Megatron's FSDP, ``shards``, before the first iteration, and
    ``wider``, which goes on from ``start`` with a larger vocabulary.
    """
    folder = tmp_path_factory.mktemp("two")
    start, shards = folder / "start", folder / "shards"
    first = {
        "start": f"{FSDP} --save {start} --train-iters 0",
        "shards": f"{KINDS['zero-3']} --save {shards} --train-iters 0",
    }
    rest = {"wider": f"{FSDP} {WIDER} --load {start} --json-log {folder / 'wider'}"}
    for kind, words in KINDS.items():
        first[f"{kind}-whole"] = saving(folder / f"{kind}-whole", LAST, words)
        first[f"{kind}-half"] = saving(folder / f"{kind}-halves", "--exit-interval 3", words)
        rest[f"{kind}-rest"] = saving(folder / f"{kind}-halves", LAST, words)
    for cases in (first, rest):
        curves.run(folder / "log", [*tiny.flags_for(dataset), "--no-plot"], cases, 2)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_data_parallel_processes(of_two, kind):
    _same(of_two / f"{kind}-whole", of_two / f"{kind}-halves")


def test_what_fsdp_saves_is_what_one_process_saves(of_two, train, tmp_path):
    """Gated MLPs, too, whose rows megatron-core would mix up."""
    train("--save", tmp_path / "one", "--swiglu", "--train-iters", 0)
    assert tiny.differences(of_two / "start" / "iter_0000000", tmp_path / "one" / "iter_0000000") == []


@pytest.mark.parametrize("folder", ["shards", "start"])
def test_every_run_reads_the_weights_of_fsdp(of_two, train, tmp_path, folder):
    """Those that each rank had some uneven rows of, and gated MLPs in halves, too."""
    words = ("--swiglu", "--train-iters", 1, "--eval-iters", 0)
    train("--json-log", tmp_path / "plain", *words)
    train("--load", of_two / folder, "--finetune", "--json-log", tmp_path / "read", *words)
    assert tiny.losses(tmp_path / "read") == tiny.losses(tmp_path / "plain")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "",
            "that was sharded by Megatron's FSDP, which requires --zero-2-memory-optimization or",
        ),
        (
            "--finetune --make-vocab-size-divisible-by 300",
            "has a vocabulary of 256 tokens including padding, but",
        ),
    ],
)
def test_what_cannot_be_read_of_fsdp_is_said(of_two, train, words, said):
    with pytest.raises(UsageError, match=said):
        train("--load", of_two / "shards", "--swiglu", *words.split())


def test_fsdp_pads_the_vocabulary_of_what_it_loads(of_two, train, tmp_path):
    train("--load", of_two / "start", "--swiglu", *WIDER.split(), "--json-log", tmp_path / "one")
    assert tiny.losses(of_two / "wider") == pytest.approx(tiny.losses(tmp_path / "one"), rel=1e-5)


def _same(whole, halves):
    one, other = whole / "metrics.jsonl", halves / "metrics.jsonl"
    assert tiny.losses(one) == tiny.losses(other)
    assert len(tiny.losses(one)) == 6
    assert tiny.rows(one, "validation") == tiny.rows(other, "validation")
    assert tiny.differences(whole / "iter_0000006", halves / "iter_0000006") == []


def test_the_comparison_can_fail(train, tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        train("--save", tmp_path / name, "--train-iters", 1, "--eval-iters", 0, "--seed", seed)
    assert tiny.differences(tmp_path / "a" / "iter_0000001", tmp_path / "b" / "iter_0000001")


def test_the_initial_checkpoint_is_the_initial_state(train, tmp_path):
    """A run from a checkpoint of iteration 0 is the run that never stopped, optimizer included."""
    common = ("--lr-decay-iters", 6, "--eval-iters", 0)
    train("--json-log", tmp_path / "whole", *common)
    train("--save", tmp_path / "zero", "--train-iters", 0, *common)
    again = ("--load", tmp_path / "zero", "--override-opt_param-scheduler")
    train("--json-log", tmp_path / "again", *again, *common)
    assert tiny.losses(tmp_path / "whole") == tiny.losses(tmp_path / "again")


def test_finetune_takes_the_weights_alone(train, tmp_path):
    train("--save", tmp_path / "a")
    summary = train("--load", tmp_path / "a", "--finetune", "--json-log", tmp_path / "m", "--train-iters", 2)
    assert summary.iterations == 2
    assert summary.consumed_samples == 8
    assert tiny.losses(tmp_path / "m")[1] < 5.3  # a fresh model begins at ln 256 = 5.55


def test_layout_may_change_on_the_way(flags, train, tmp_path):
    """A checkpoint of one process goes on with two, and theirs with one, optimizer included."""
    quiet: tuple = (*NO_DROPOUT.split(), "--eval-iters", 0, "--no-plot")
    quiet += ("--make-vocab-size-divisible-by", 64)
    train("--json-log", tmp_path / "whole", *quiet)
    layouts = {"tp": "--tensor-model-parallel-size 2", "pp": "--pipeline-model-parallel-size 2", "dp": ""}
    layouts["fsdp"] = "--fsdp-memory-optimization"
    saves = {name: tmp_path / name for name in layouts}
    train("--save", tmp_path / "one", "--exit-interval", 2, *quiet)
    for save in saves.values():
        shutil.copytree(tmp_path / "one", save)
    with_two = {name: saving(saves[name], "--exit-interval 4", words) for name, words in layouts.items()}
    curves.run(tmp_path / "log", flags(*quiet), with_two, 2)
    expected = tiny.losses(tmp_path / "whole")
    for name, save in saves.items():
        train("--save", save, "--load", save, *quiet)
        assert tiny.losses(save / "metrics.jsonl") == pytest.approx(expected, rel=1e-5), name
