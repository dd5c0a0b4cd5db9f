"""CUDA's paths on fake tensors: each operation, and the driver in a few layouts; ``grid.py`` has them all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_npu.ops import dispatch
from megatron_npu.planning.fake_cuda import library
from tests.fake_cuda import grid
from tests.fake_cuda.ranks import OPERATIONS

LAYOUTS = ("tp2-pp2-dp2", "cp2")
# what has no fake kernel in torch 2.13
BEYOND_FAKE = {f"sgd in {dtype}" for dtype in dispatch.KERNEL_DTYPES}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    if library.unavailable():
        pytest.skip(library.unavailable())
    folder = tmp_path_factory.mktemp("fake")
    chosen = {name: (grid.EVERYWHERE | grid.CORE)[name] for name in LAYOUTS}
    calls = {"name": "operations", "rank": 0, "ranks": 1, "received": [], "words": OPERATIONS}
    found = grid.run(folder, [*grid.cases(folder, None, chosen), calls], None)
    return found | {"log": (folder / "operations.log").read_text()}


def test_every_operation_runs_forward_and_backward(reports):
    lines = [line for line in reports["log"].splitlines() if " in torch." in line and ": " in line]
    assert {line.partition(":")[0] for line in lines} == BEYOND_FAKE, "\n".join(lines)
    called = set(reports["operations"]["operations"])
    assert {"attention", "attention_part", "linear_cross_entropy", "rms_norm", "rotary", "adam"} <= called


def test_layouts_train_a_step(reports):
    names = [name for name in reports if name not in ("operations", "log")]
    assert len(names) == 3  # of the pipeline two stages
    assert {name: grid.wrong(reports[name]) for name in names} == dict.fromkeys(names)
    assert {"attention", "adam", "weight_gradient"} <= set(reports["tp2-pp2-dp2-rank7"]["operations"])
    assert {"attention_part", "attention_part_backward"} <= set(reports["cp2-rank1"]["operations"])


def test_each_rank_updates_its_part_of_the_parameters(reports):
    """Whole with context parallelism; halves of TP, of PP's stages and of the distributed optimizer."""
    hidden, feed_forward, vocabulary, length = 64, 256, 256, 64
    layer_halved = 4 * hidden * hidden + 2 * hidden * feed_forward + 3 * hidden + feed_forward
    layer_whole = 4 * hidden + 2 * hidden  # two norms; biases behind the row-parallel products
    embedding, positions, last_norm = vocabulary * hidden, length * hidden, 2 * hidden
    whole = 2 * (layer_halved + layer_whole) + embedding + positions + last_norm
    first = layer_halved // 2 + layer_whole + embedding // 2 + positions
    last = layer_halved // 2 + layer_whole + embedding // 2 + last_norm
    updated = {name: report["elements_updated"] for name, report in reports.items() if "-rank" in name}
    assert updated["cp2-rank1"] == whole
    # buffers of the distributed optimizer are padded, so the halves are of a little more
    assert first / 2 - 128 <= updated["tp2-pp2-dp2-rank0"] <= first / 2 + 128
    assert last / 2 - 128 <= updated["tp2-pp2-dp2-rank7"] <= last / 2 + 128


def test_ranks_are_waited_for_as_long_as_some_end():
    """However slow a machine is; and what has ended is kept when no more do."""
    endless = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    counts = iter([1, 2, 2])
    try:
        grid._wait(endless, lambda: next(counts), longest=0.01)
        assert endless.poll() is None
        assert not list(counts)
    finally:
        endless.kill()
        endless.communicate()
    failing = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])
    with pytest.raises(subprocess.CalledProcessError):
        grid._wait(failing, lambda: 0)
