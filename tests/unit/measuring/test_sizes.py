"""Sizes of models: the document's own numbers, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_npu.base.arg_parser import Unfit
from megatron_npu.measuring import estimate
from megatron_npu.measuring.job import Job
from megatron_npu.measuring.schemes import SUITES
from megatron_npu.measuring.sizes import BERT, GPT, parameters
from megatron_npu.measuring.workloads import megatron

BILLION = 10**9


def job(suite: str, row: int, size: str, ranks: int = 4, **values) -> Job:
    """Return a row of a suite as the document trains it."""
    found = SUITES[suite]
    micro = found.micro_batch_size
    whole = Job(
        workload=found.workload,
        scheme=found.schemes[row],
        size=found.family.size(size),
        ranks=ranks,
        micro_batch_size=micro,
        global_batch_size=micro * ranks,
        steps=20,
        repeat=5,
    )
    return replace(whole, **values)


def test_the_documents_models_have_its_parameters():
    assert parameters(BERT, BERT.size("bert-base")) == 110_106_428
    assert parameters(GPT, GPT.size("gpt-1.3b")) == 1_313_722_368


def test_a_shape_is_a_size():
    size = GPT.size("4x256", seq_length=32)
    assert (size.layers, size.hidden, size.heads, size.seq_length, size.vocabulary) == (4, 256, 4, 32, 50304)
    assert BERT.size("2x96x3").heads == 3


@pytest.mark.parametrize("text", ["bert-base", "4x", "0x64", "4x100x3", "huge"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(Unfit):
        GPT.size(text)


def test_states_of_the_documents_rows():
    """Where a card of 32 GB was too small, and by how much sharding helps; bytes counted by hand."""
    count = 1_313_722_368
    # fp32; then 2 of weights, 4 of gradients (2 by torch's FSDP) and 12 of the optimizer
    bytes_of_a_weight = [16, 18, 6 + 12 / 4, 2 + 16 / 4, 18 / 4, 16 / 4]
    for row, wanted in enumerate(bytes_of_a_weight):
        found = job("sharding", row, "gpt-1.3b")
        assert estimate.states(found, GPT, host_is_device=False) == pytest.approx(wanted * count, abs=1)
    offloaded = job("sharding", 6, "gpt-1.3b")
    assert estimate.states(offloaded, GPT, host_is_device=False) == 6 * count
    assert estimate.states(offloaded, GPT, host_is_device=True) == 18 * count
    in_fp16 = replace(job("sharding", 1, "gpt-1.3b"), mixed_precision="fp16")
    assert estimate.states(in_fp16, GPT, host_is_device=False) == 16 * count


def test_the_rows_of_sharding_are_words_of_the_driver():
    """Megatron's GPT, as the document's table; plain data parallelism where the row has no word."""
    rows = [megatron.flags(job("sharding", row, "gpt-1.3b")) for row in range(7)]
    words = [{word for word in row if "memory-optimization" in word or "offload" in word} for row in rows]
    shared = [{f"--{name}-memory-optimization"} for name in ("zero-1", "zero-2", "zero-3", "fsdp")]
    assert words == [set(), set(), *shared, {"--cpu-offload"}]
    assert ["--bf16" in row for row in rows] == [False, *[True] * 6]
    assert rows[0][rows[0].index("--hidden-size") + 1] == "2048"


def test_tensor_parallel_ranks_share_all_and_stages_their_layers():
    whole = estimate.states(job("3d", 0, "gpt-1.3b"), GPT, host_is_device=False)
    assert whole == 18 * 1_313_722_368
    assert estimate.states(job("3d", 2, "gpt-1.3b"), GPT, host_is_device=False) == whole // 4
    stages = estimate.states(job("3d", 4, "gpt-1.3b"), GPT, host_is_device=False)
    assert whole / 4 < stages < whole / 2


def test_a_job_is_what_was_written():
    one = job("3d", 5, "gpt-tiny", memory_limit=1 << 30)
    assert Job.from_json(one.to_json()) == one
    assert (one.data_parallel_size, one.micro_batches) == (1, 4)
