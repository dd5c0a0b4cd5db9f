"""The stock pretrain_gpt.py in every parallel layout against one process, from one shared checkpoint.

Usage: python -m tests.distributed.stock_grid TREE [--device cpu npu] [--layout NAME...] [--output FILE]

The losses of every run are those of a single process on the CPU, up to rounding. ``test_stock_grid.py`` runs
a selection; this command runs all, prints how far each is off, and ends with 1 if one is off by more than its
limit. TREE is a Megatron-LM tree of core_v0.12 or newer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_npu.base import files
from tests.support import stock_core, tiny

STEPS = 20
# Four layers, so that two stages can be interleaved.
MODEL = [
    *f"--num-layers 4 --vocab-size {tiny.SIZE} --train-iters {STEPS} --eval-iters 0".split(),
    *"--lr 5e-3 --min-lr 1e-3".split(),
]
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"


@dataclass(frozen=True)
class Layout:
    """How a run is spread over processes.

    Attributes:
        processes: their number.
        flags: of the script, besides those of the model.
        limit: the largest relative deviation of a loss from that of one process in fp32.
    """

    processes: int
    flags: str
    limit: float = 1e-6


BF16 = 1e-2
LAYOUTS = {
    "one": Layout(1, ""),
    "tp2": Layout(2, TP2),
    "tp2-sp": Layout(2, f"{TP2} --sequence-parallel"),
    "pp2": Layout(2, PP2),
    "pp2-interleaved": Layout(2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "dp2": Layout(2, ""),
    "dp2-distributed-optimizer": Layout(2, "--use-distributed-optimizer --overlap-grad-reduce"),
    "cp2": Layout(2, "--context-parallel-size 2 --no-create-attention-mask-in-dataloader"),
    "tp2-pp2": Layout(4, f"{TP2} {PP2}"),
    "bf16-tp2-sp": Layout(2, f"--bf16 {TP2} --sequence-parallel", BF16),
    "bf16-dp2-distributed-optimizer": Layout(2, "--bf16 --use-distributed-optimizer", BF16),
}


@dataclass(frozen=True)
class Result:
    """What one run of the grid has logged: losses and gradient norms by iteration, and its duration [s]."""

    device: str
    layout: str
    losses: list[float]
    gradients: list[float]
    seconds: float

    def deviation(self, expected: Result) -> float:
        """Return the largest relative difference of a loss."""
        assert len(self.losses) == len(expected.losses) == STEPS
        return max(abs(a - b) / b for a, b in zip(self.losses, expected.losses, strict=True))


class Grid:
    """The runs of one tree that begin with the weights of one checkpoint, in ``folder``."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree, self.folder = tree, folder
        self.data = tiny.write_dataset(folder / "text")
        save = ["--save", str(folder / "start"), "--save-interval", "1", "--exit-interval", "1"]
        stock_core.losses(stock_core.pretrain(tree, folder, *MODEL, *save, data=self.data))

    def run(self, device: str, layout: str) -> Result:
        """Train in a layout on a device; the initial weights are the checkpoint's.

        Raises:
            AssertionError: the run has failed, or not been on the device.
        """
        processes, flags = LAYOUTS[layout].processes, LAYOUTS[layout].flags.split()
        load = ["--load", str(self.folder / "start"), "--finetune", "--no-load-optim", "--no-load-rng"]
        changes = [*MODEL, *load, *flags]
        began = time.monotonic()
        done = stock_core.pretrain(
            self.tree, self.folder, *changes, processes=processes, device=device, data=self.data
        )
        losses = stock_core.losses(done)
        assert {"cpu": "· cpu/gloo", "npu": "· simulated npu/hccl"}[device] in done.stdout
        return Result(device, layout, losses, stock_core.norms(done), round(time.monotonic() - began, 1))


def main() -> int:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        grid = Grid(options.tree.resolve(), Path(folder))
        expected = grid.run("cpu", "one")
        assert expected.losses[-1] < expected.losses[0] - 0.2, expected.losses
        pairs = [(device, layout) for device in options.device for layout in options.layout]
        rows = [_compared(grid, device, layout, expected) for device, layout in pairs]
    if options.output:
        _write(
            options.output, {"tree": options.tree.name, "steps": STEPS, "runs": [row for row in rows if row]}
        )
    return 0 if all(row and row["deviation"] <= LAYOUTS[row["layout"]].limit for row in rows) else 1


def _compared(grid: Grid, device: str, layout: str, expected: Result) -> dict | None:
    """Run, print one line, and return the result as a row with its deviation; None if the run has failed."""
    try:
        result = grid.run(device, layout)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(f"{device} {layout:32} failed: {error}", flush=True)
        return None
    deviation = result.deviation(expected)
    print(f"{device} {layout:32} {deviation:.1e} {result.seconds:5.0f} s", flush=True)
    return {**asdict(result), "deviation": deviation}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, metavar="TREE")
    parser.add_argument("--device", nargs="+", choices=["cpu", "npu"], default=["cpu", "npu"])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--output", type=Path)
    return parser


def _write(path: Path, content: dict) -> None:
    files.write(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
