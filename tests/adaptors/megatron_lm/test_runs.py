"""The stock ``pretrain_gpt.py``: every layout and precision trains like one process with stock operations."""

from __future__ import annotations

import argparse
import enum
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_npu.checkpoint_files import checksums
from megatron_npu.safe_files import safe_load
from tests.support import stock_lm

ITERATIONS = 10
LENGTH = f"--train-iters {ITERATIONS} --lr-decay-iters {ITERATIONS} --lr 3e-3 --lr-warmup-iters 1"
TWO_HEADS_OF_VOCABULARY = "--make-vocab-size-divisible-by 32"  # as many words at TP 2 as 64 at TP 1
TP2 = f"--tensor-model-parallel-size 2 {TWO_HEADS_OF_VOCABULARY}"
LAYOUTS = {
    "tp2": TP2,
    "tp2-sp": f"{TP2} --sequence-parallel",
    "dp2": "",
    "dp2-distributed-optimizer": "--use-distributed-optimizer",
}


def train(checkout: Path, data: Path, *changes: str, processes: int = 1, **kwargs) -> dict[int, float]:
    """Return the losses of a run of the stock script."""
    flags = [*stock_lm.flags(data), *" ".join([LENGTH, *changes]).split()]
    result = stock_lm.run(checkout / "pretrain_gpt.py", flags, processes=processes, **kwargs)
    return stock_lm.losses(stock_lm.succeeded(result))


def deviation(found: dict[int, float], expected: dict[int, float]) -> float:
    """Return the largest relative difference."""
    assert found.keys() == expected.keys()
    return max(abs(found[i] - expected[i]) / expected[i] for i in expected)


@pytest.fixture(scope="module")
def stock(checkout, data) -> dict[int, float]:
    """The curve of one process in fp32 with upstream's own operations."""
    curve = train(checkout, data, with_operations=False)
    assert sorted(curve) == list(range(1, ITERATIONS + 1))
    assert curve[ITERATIONS] < curve[1] - 0.5, "the run must learn, or curves say nothing"
    return curve


@pytest.mark.parametrize(
    "changes",
    [
        "",
        "--use-flash-attn --pre-tockens 65536 --next-tockens 65536 --shape-order BSH",
        "--recompute-activations",
        "--recompute-granularity full --recompute-method uniform",
        "--DDP-impl torch --no-gradient-accumulation-fusion",
    ],
    ids=["plain", "flash-BSH", "recompute-selective", "recompute-full", "torch-ddp"],
)
def test_one_process_trains_like_upstream(checkout, data, stock, changes):
    assert deviation(train(checkout, data, changes), stock) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_train_like_one_process(checkout, data, stock, layout):
    assert deviation(train(checkout, data, layout, processes=2), stock) < 1e-5


@pytest.mark.parametrize("layout", ["", LAYOUTS["tp2-sp"]], ids=["one", "tp2-sp"])
def test_bf16(checkout, data, stock, layout):
    found = train(checkout, data, "--bf16", layout, processes=2 if layout else 1)
    assert 0 < deviation(found, stock) < 1e-3


def test_window_changes_the_model(checkout, data, stock):
    """A sliding window is not ignored: fewer keys, other losses, the same with recomputation and layout."""
    window = "--use-flash-attn --pre-tockens 8 --next-tockens 0"
    found = train(checkout, data, window)
    assert deviation(found, stock) > 1e-3
    other = train(checkout, data, window, LAYOUTS["tp2-sp"], "--shape-order BSH", processes=2)
    assert deviation(other, found) < 1e-5


@pytest.fixture(scope="module")
def pipeline(checkout, data) -> dict[int, float]:
    """The curve of two stages; upstream draws the weights of the second from another seed."""
    return train(checkout, data, "--pipeline-model-parallel-size 2", processes=2)


def test_pipeline_trains_like_upstream(checkout, data, pipeline):
    expected = train(checkout, data, "--pipeline-model-parallel-size 2", processes=2, with_operations=False)
    assert deviation(pipeline, expected) < 1e-5


def test_tensor_and_pipeline_parallel(checkout, data, pipeline):
    found = train(checkout, data, "--pipeline-model-parallel-size 2", TP2, "--train-iters 6", processes=4)
    assert deviation(found, {i: pipeline[i] for i in found}) < 1e-5


def test_interleaved_pipeline(checkout, data):
    """Upstream allows it from three stages on; each stage holds layers 1 and 4, 2 and 5, 3 and 6."""
    flags = "--pipeline-model-parallel-size 3 --num-layers 6 --global-batch-size 12 --train-iters 6"
    interleaved = f"{flags} --num-layers-per-virtual-pipeline-stage 1"
    found = train(checkout, data, interleaved, processes=3)
    expected = train(checkout, data, interleaved, processes=3, with_operations=False)
    assert deviation(found, expected) < 1e-5


@pytest.mark.parametrize("layout", ["", "--pipeline-model-parallel-size 2"], ids=["one", "pp2"])
def test_fp16_skips_overflows(checkout, data, layout):
    """The first steps overflow on every rank alike; what follows is the fp32 curve, late."""
    fp16 = "--fp16 --initial-loss-scale 2097152 --train-iters 12 --lr-decay-iters 12"
    flags = [*stock_lm.flags(data), *f"{fp16} {layout}".split()]
    result = stock_lm.run(checkout / "pretrain_gpt.py", flags, processes=2 if layout else 1)
    output = stock_lm.succeeded(result)
    skipped = output.count("number of skipped iterations:   1")
    assert 1 <= skipped <= 8, output[-3000:]
    found = stock_lm.losses(output)
    assert len(found) == 12 - skipped
    assert found[12] < next(iter(found.values())) - 0.05


def test_resume_to_the_bit(checkout, data, tmp_path):
    """bf16 with dropout and a distributed optimizer, whose state lies in a file of each rank.

    But for the host's generator: upstream draws a seed more for the loaders of a resume. The newest of the
    checkpoints is damaged when it goes on: it is refused, or passed over as --load-last-good says.
    """
    layout = "--bf16 --use-distributed-optimizer --attention-dropout 0.1 --hidden-dropout 0.1"
    common = f"--train-iters 8 --lr-decay-iters 8 --save-interval 4 {layout}"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(checkout, data, common, f"--save {whole}", processes=2)
    train(checkout, data, common, f"--save {parts} --exit-interval 4", processes=2)
    damaged = shutil.copytree(whole / "iter_0000008", parts / "iter_0000008")
    shutil.copy(whole / "latest_checkpointed_iteration.txt", parts)
    assert checksums.damaged(damaged) == []
    spoilt = next(damaged.glob("*/model*.pt"))
    content = bytearray(spoilt.read_bytes())
    content[len(content) // 2] ^= 1
    spoilt.write_bytes(content)
    loading = [*stock_lm.flags(data), *f"{common} --load {parts}".split()]
    refused = stock_lm.run(checkout / "pretrain_gpt.py", loading)
    assert refused.returncode == 2
    assert f"{spoilt.name} has different content from when it was saved" in refused.stderr.splitlines()[-1]
    train(checkout, data, common, f"--save {parts} --load {parts} --load-last-good", processes=2)
    assert checksums.damaged(damaged) == []  # it was written over
    files = [path.relative_to(whole) for path in whole.glob("iter_0000008/*/*.pt")]
    assert len(files) == 3
    for file in files:
        assert different(whole / file, parts / file) <= {"rng_state.0.torch_rng_state"}
    for path in whole.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o750 if path.is_dir() else 0o640), path
    assert not list(whole.glob("*.partial"))
    assert (whole / "latest_checkpointed_iteration.txt").read_text() == "8"


class ModelType(enum.Enum):
    """As ``megatron.model.enums.ModelType``, which is among the arguments in a checkpoint."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2


def load(path: Path) -> dict:
    """Return a checkpoint's content without Megatron: tensors, arguments, numpy's random state."""
    multiarray = np._core.multiarray
    harmless = [argparse.Namespace, np.ndarray, np.dtype, np.dtypes.UInt32DType, multiarray._reconstruct]
    with safe_load.allowing(*harmless, (ModelType, "megatron.model.enums.ModelType")):
        return torch.load(path, map_location="cpu", weights_only=True)


def different(one: Path, other: Path) -> set[str]:
    """Return the names of the tensors of two checkpoints that differ by so much as a bit."""
    first, second = (dict(tensors(load(path))) for path in (one, other))
    assert len(first) > 20
    assert first.keys() == second.keys()
    return {name for name, tensor in first.items() if not torch.equal(tensor, second[name])}


def tensors(content, prefix=""):
    """Yield every tensor in nested containers with its path."""
    if isinstance(content, torch.Tensor):
        yield prefix.removeprefix("."), content
    elif isinstance(content, dict):
        for name, value in content.items():
            yield from tensors(value, f"{prefix}.{name}")
    elif isinstance(content, (list, tuple)):
        for number, value in enumerate(content):
            yield from tensors(value, f"{prefix}.{number}")


def test_bf16_finetune_keeps_the_loaded_weights(checkout, data, tmp_path):
    """Upstream forgets them after one step: its fp32 copies are still the initial weights."""
    trained = train(checkout, data, f"--bf16 --save {tmp_path} --save-interval {ITERATIONS}")
    again = "--train-iters 3 --lr 1e-6 --min-lr 1e-7 --lr-decay-iters 3"
    found = train(checkout, data, f"--bf16 --load {tmp_path} --finetune {again}")
    assert max(found.values()) < trained[ITERATIONS - 2]
