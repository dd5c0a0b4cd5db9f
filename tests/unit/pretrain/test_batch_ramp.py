"""A batch that grows: the sizes and the number of iterations are those of megatron-core's calculator."""

from __future__ import annotations

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import arguments, validation
from megatron_npu.pretrain.flags.batch_ramp import Ramp

pytest.importorskip("megatron.core")
RAMPS = [(2, 2, 30, 8), (4, 4, 100, 32), (1, 3, 7, 10), (16, 8, 3000, 128), (3, 1, 10, 4), (2, 2, 1, 8)]


def upstream(ramp):
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    start, increment, samples, last = ramp
    return RampupBatchsizeNumMicroBatchesCalculator(last, 1, 1, False, 1, start, increment, samples)


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_sizes_are_those_of_upstream(ramp):
    calculator, ours = upstream(ramp), Ramp(*ramp)
    at = 0
    while at < ramp[2] + 3 * ramp[3]:
        calculator.update(at, consistency_check=True)
        assert ours.size(at) == calculator.get_current_global_batch_size()
        at += ours.size(at)
    assert ours.size(at) == ramp[3]


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_iterations_are_those_of_upstream_behind_the_ramp(ramp):
    """As ``update_train_iters`` of megatron/training counts them: the ramp's, then whole batches."""
    calculator = upstream(ramp)
    at = count = 0
    while at <= ramp[2]:
        calculator.update(at, consistency_check=False)
        at += calculator.get_current_global_batch_size()
        count += 1
    for more in (0, 1, ramp[3] - 1, ramp[3], 5 * ramp[3] + 1):
        assert Ramp(*ramp).iterations(0, at + more) == count + more // ramp[3]


def test_a_run_that_ends_or_goes_on_in_its_ramp_has_whole_batches_alone():
    ramp = Ramp(2, 2, 30, 8)  # 2 until 10 samples, 4 until 20, 6 up to 30
    sizes = [2, 2, 2, 2, 2, 4, 4, 4, 6, 6, 8]
    for count in range(len(sizes) + 1):
        end = sum(sizes[:count])
        assert ramp.iterations(0, end) == count
        assert ramp.iterations(0, end + 1) == count
        assert ramp.iterations(end, sum(sizes)) == len(sizes) - count


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--train-iters 6 --rampup-batch-size 2 1 8", "requires --train-samples"),
        ("--train-samples 90 --rampup-batch-size 1 2 8", "a whole number of increments"),
        ("--train-samples 90 --rampup-batch-size 4 1 8", "start below --global-batch-size 4"),
        (
            "--train-samples 90 --rampup-batch-size 2 1 8 --micro-batch-size 2",
            "its increment must be a multiple of .*, but got 1",
        ),
        ("--train-samples 90 --rampup-batch-size 1 1 8 --micro-batch-size 2", "the start of --rampup"),
        ("--train-samples 90 --rampup-batch-size 2 2", "--rampup-batch-size"),
        ("--train-samples 90 --rampup-batch-size 2 2 0", "--rampup-batch-size"),
    ],
)
def test_what_does_not_fit_is_refused(flags, words, named, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    argv = flags(*words.split())
    if "--train-samples" in argv:
        at = argv.index("--train-iters")
        del argv[at : at + 2]
    with pytest.raises(UsageError, match=named):
        validation.check(arguments.parse(argv))
