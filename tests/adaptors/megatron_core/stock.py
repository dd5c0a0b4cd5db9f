"""Runs of Megatron-LM's own scripts of a core_v0.* tree, unedited, as a user starts them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests import warm
from tests.conftest import LONGEST
from tests.end_to_end import tiny
from tests.sim.conftest import run_simulated

# --transformer-impl is left at its default, transformer_engine, which is not installed
FLAGS = [
    *"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64".split(),
    *"--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3".split(),
    *"--train-iters 6 --log-interval 1 --eval-interval 100 --eval-iters 1 --split 90,5,5".split(),
    *"--tokenizer-type NullTokenizer --vocab-size 1023 --attention-dropout 0 --hidden-dropout 0".split(),
]

Run = subprocess.CompletedProcess[str]


def git_status(tree: Path) -> str:
    return subprocess.run(
        ["git", "-C", tree, "status", "--short"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def pretrain(
    tree: Path,
    folder: Path,
    *changes: str,
    processes: int = 1,
    device: str = "cpu",
    data: Path | None = None,
    **variables: str,
) -> Run:
    """Run pretrain_gpt.py of ``tree`` in ``folder``; it must leave the tree as it is.

    Args:
        changes: flags behind ``FLAGS``, over which they win.
        device: ``cpu``, or ``npu`` for simulated Ascend NPUs.
        data: prefix of the dataset; None is upstream's mock data.
        variables: of the environment.
    """
    arguments = [*(["--data-path", str(data)] if data else ["--mock-data"]), *FLAGS, *changes]
    return run_script(
        tree, folder, "pretrain_gpt.py", *arguments, processes=processes, device=device, **variables
    )


def run_script(
    tree: Path,
    folder: Path,
    script: str,
    *arguments: str,
    processes: int = 1,
    device: str = "cpu",
    **variables: str,
) -> Run:
    """Run ``script``, a path in ``tree``, in ``folder``; it must leave the tree as it is."""
    before = git_status(tree)
    command = tiny.command("run", str(tree / script), *arguments, processes=processes)
    variables = {"MEGATRON_LM_PATH": str(tree), **variables}
    if device == "npu":
        done = run_simulated(*command, cwd=folder, timeout=LONGEST, **variables)
        done.stderr = done.stdout  # it has both
    else:
        done = warm.run(
            command,
            env=tiny.environment() | variables,
            modules=warm.STOCK,
            tree=tree,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
    assert git_status(tree) == before
    return done


def losses(done: Run) -> list[float]:
    """Return the training losses that the script has logged, one for each iteration."""
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(loss) for loss in re.findall(r"iteration .* lm loss: (\S+)", done.stdout)]


def norms(done: Run) -> list[float]:
    """Return the norms of the gradient that the script has logged."""
    return [float(norm) for norm in re.findall(r"grad norm: (\S+)", done.stdout)]


def final_loss(done: Run) -> str:
    """Return the loss on the test set."""
    return re.search(r"test set \| lm loss value: (\S+)", done.stdout)[1]
