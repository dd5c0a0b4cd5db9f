"""What a machine can run, before anything is started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.measuring import arguments
from megatron_npu.measuring.machine import Machine, _features
from megatron_npu.measuring.plan import plan
from megatron_npu.measuring.ranks import NA, OOM

CPU = Machine("cpu", "cpu", None, True, False, True, 2, frozenset())
CUDA = Machine("cuda", "cuda", 8, False, False, False, 64, frozenset())


def planned(line: str, machine: Machine = CPU):
    return plan(arguments.parser().parse_args(line.split()), machine)


def beforehand(line: str, row: int, machine: Machine = CPU):
    found = planned(line, machine)
    return found.outcome_beforehand(found.job(found.suite.schemes[row]))


def test_a_device_gets_the_documents_sizes_and_a_cpu_small_ones():
    there = planned("--suite mixed-precision", CUDA)
    assert (there.size.name, there.ranks) == ("bert-base", 4)
    assert (there.micro_batch_size, there.global_batch_size) == (16, 64)
    here = planned("--suite mixed-precision")
    assert (here.size.name, here.ranks, here.global_batch_size) == ("bert-tiny", 4, 16)
    assert "bert-base" in here.said[0]


def test_layouts_that_the_devices_are_too_few_for_are_not_run():
    line = "--suite 3d --devices 2"
    assert beforehand(line, 1) is None
    outcome = beforehand(line, 2)
    assert (outcome.kind, outcome.reason) == (
        NA,
        "4 x 1 requires a number of devices that is a multiple of 4, but there are 2",
    )
    assert "multiple of 16" in beforehand("--suite 3d --devices 4", 6).reason
    assert "3 heads" in beforehand("--suite 3d --devices 2 --model 2x96x3", 1).reason
    assert "3 layers" in beforehand("--suite 3d --devices 2 --model 3x64", 3).reason


def test_switches_that_are_refused_here_are_not_run():
    outcome = beforehand("--suite sharding --devices 2", 6)
    assert outcome.kind == NA
    assert "--cpu-offload on the cpu device" in outcome.reason
    assert beforehand("--suite sharding", 6, replace(CUDA, count=4)) is None


def test_what_cannot_fit_is_not_started():
    """80 layers of 8192 need 1.2 TB a rank; 16 bytes for each of 1.3 billion parameters are no 4 GB."""
    outcome = beforehand("--suite sharding --devices 2 --model 80x8192", 1)
    assert outcome.kind == OOM
    assert outcome.reason.startswith("not started, because a rank needs an estimated")
    line = "--suite sharding --model gpt-1.3b --memory-limit 8G"
    assert beforehand(line, 1, CUDA).kind == OOM
    assert beforehand(line, 5, CUDA) is None  # shared out over four: 5.3 GB, and its activations


def test_a_cpus_ranks_share_what_is_there():
    assert planned("--suite 3d --devices 2").job(planned("--suite 3d").suite.schemes[0]).memory_limit
    assert planned("--suite 3d", CUDA).job(planned("--suite 3d").suite.schemes[0]).memory_limit is None


@pytest.mark.parametrize(
    ("line", "machine", "told"),
    [
        ("--suite 4d", CPU, "mixed-precision, sharding, 3d or graph"),
        ("--suite 3d --model bert-base", CPU, "gpt-tiny, gpt-124m, gpt-1.3b, or LAYERSxHIDDEN"),
        ("--suite 3d --devices 9", CUDA, "must be at most 8"),
        ("--suite 3d --devices 4 --global-batch-size 6", CPU, "a multiple of 4"),
        ("--suite 3d --memory-limit much", CPU, "bytes"),
        ("--suite 3d --json /nowhere/table.json", CPU, "the folder /nowhere does not exist"),
        ("--suite 3d --json /proc/table.json", CPU, "/proc is not writable"),
        ("--suite 3d --plot /proc", CPU, "/proc cannot be written: it is a folder"),
        (
            "--suite 3d --json same --markdown same",
            CPU,
            "each output must be a different file, but two of them are",
        ),
    ],
)
def test_bad_input_is_one_line(line, machine, told):
    with pytest.raises(UsageError, match=told):
        planned(line, machine)


def test_under_torchrun_it_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="starts its own ranks"):
        planned("--suite 3d")


def test_the_instructions_of_a_processor(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert "bf16" in _features(path)
    assert _features(tmp_path / "none") == frozenset()
