"""A training run that takes milliseconds: a model with two layers, on data that counts up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from megatron_npu.data.preprocessing import indexed_dataset
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
SIZE = 255  # --vocab-size; 255 is the end of document


def write_dataset(prefix: Path, *, documents: int = 100, largest: int = SIZE, seed: int = 0) -> Path:
    """Write documents that count up in steps of 1 to 3 and end with ``largest``; return their prefix."""
    generator = np.random.default_rng(seed)
    with indexed_dataset.Writer(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            length, start, step = (
                int(generator.integers(*bounds)) for bounds in ((50, 200), (0, 255), (1, 4))
            )
            tokens = ((start + step * np.arange(length)) % 255).astype(np.uint16)
            tokens[-1] = largest
            writer.add(tokens.tobytes(), np.array([length], np.int32), np.array([1], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])
    return prefix


def flags_for(dataset: Path) -> list[str]:
    """Return the flags of the tiny run; later flags on a command line take precedence.

    The run does not plot its losses, because matplotlib would take longer than the run.
    """
    return [
        *"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split(),
        *"--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2".split(),
        *"--train-iters 6 --log-interval 1 --eval-iters 1 --split 90,10,0 --no-plot".split(),
        *f"--tokenizer-type NullTokenizer --vocab-size {SIZE} --data-path {dataset}".split(),
    ]


def environment() -> dict[str, str]:
    """Return the environment of a child process: this tree, one thread, and the CPU."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MEGATRON_NPU_DEVICE": "cpu"}


def torchrun(processes: int) -> list[str]:
    """Return the words, to follow ``python``, that start a program in several processes."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def command(*arguments: str, processes: int = 1) -> list[str]:
    """Return the command line of ``megatron-npu``, under torchrun for several processes."""
    launcher = torchrun(processes) if processes > 1 else []
    return [sys.executable, *launcher, "-m", "megatron_npu", *arguments]


def run(*arguments: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Run ``megatron-npu`` to its end."""
    return run_python(command(*arguments, processes=processes))


def run_python(argv: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Python program that imports the driver to its end, by default in ``environment()``."""
    return warm.run(
        argv,
        env=env or environment(),
        modules=warm.DRIVER,
        capture_output=True,
        text=True,
        check=False,
    )


def rows(path: Path, event: str = "train") -> list[dict]:
    """Return the JSON lines of one kind of event."""
    lines = map(json.loads, path.read_text().splitlines())
    return [row for row in lines if row["event"] == event]


def losses(path: Path) -> dict[int, float]:
    """Return the training loss of each iteration."""
    return {row["iteration"]: row["loss"] for row in rows(path)}


def tensors(checkpoint: Path) -> dict[str, object]:
    """Return every tensor and object of a distributed checkpoint, by its key."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    content: dict[str, object] = {}
    reader = FileSystemReader(checkpoint)
    _load_state_dict(content, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return content


def differences(one: Path, other: Path) -> list[str]:
    """Return the keys whose contents are not bitwise identical.

    Settings that torch adds to an optimizer when it is loaded are ignored.
    """
    import torch

    first, second = (
        {key: value for key, value in _flat(tensors(folder)).items() if not key.endswith("/differentiable")}
        for folder in (one, other)
    )
    assert first
    assert first.keys() == second.keys()
    return [
        key
        for key, value in first.items()
        if isinstance(value, torch.Tensor) and not torch.equal(value, second[key])
    ]


def _flat(content: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(content, dict):
        return {prefix: content}
    return {
        name: value
        for key, inner in content.items()
        for name, value in _flat(inner, f"{prefix}/{key}").items()
    }


def environment_of(root: Path) -> dict[str, str]:
    """Return an environment in which Megatron is the one in ``root``."""
    path = os.pathsep.join([str(root), environment()["PYTHONPATH"]])
    return environment() | {"MEGATRON_LM_PATH": str(root), "PYTHONPATH": path}
