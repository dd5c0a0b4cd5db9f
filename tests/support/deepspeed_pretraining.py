"""Helpers for short runs of the tree's ``pretrain_gpt.py``."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import stock_lm, warm

ITERATIONS = 6
# what others of these tests go through, too
_EVERY = os.environ.get("TEST_EVERY_VERSION") == "1"
RARELY = pytest.mark.skipif(not _EVERY, reason="TEST_EVERY_VERSION=1 runs it")
TP2 = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 32"
_SCRIPTS = Path(__file__).resolve().parents[1] / "adaptors" / "megatron_deepspeed"


def train(tree: Path, data: Path, *changes: str, processes: int = 1) -> dict[int, float]:
    """Return the losses of a run of a script of the tree."""
    script, *flags = steps(tree, data, *changes)
    return stock_lm.losses(stock_lm.succeeded(stock_lm.run(Path(script), flags, processes=processes)))


def train_sentences(
    tree: Path, data: Path, script: str, *changes: str, processes: int = 1
) -> dict[int, float]:
    """Return the losses of a short run of a tree's BERT or T5 on the data from ``write_sentences``."""
    given = [*stock_lm.sentence_flags(data, script), *" ".join(changes).split()]
    return stock_lm.losses(stock_lm.succeeded(stock_lm.run(tree / script, given, processes=processes)))


def steps(tree: Path, data: Path, *changes: str) -> list[str]:
    """Return the script and the flags of a short run."""
    more = " ".join(changes).split()
    return [str(tree / "pretrain_gpt.py"), *stock_lm.flags(data), "--train-iters", str(ITERATIONS), *more]


def samples(tree: Path, data: Path, file: Path, *changes: str) -> list[str]:
    """Return the script and the flags that write two short unconditional samples into ``file``.

    The weights are large, so that the visible tokens determine the next token. Most logits belong to no
    token.
    """
    drawn = f"--num-samples 2 --out-seq-length 12 --top_p 0.9 --genfile {file}"
    of_model = "--init-method-std 0.3 --make-vocab-size-divisible-by 1024"
    more = " ".join([drawn, of_model, *changes]).split()
    return [str(tree / "tools" / "generate_samples_gpt.py"), *stock_lm.flags(data), *more]


def engine(folder: Path, stage: int, **more: object) -> str:
    """Write a DeepSpeed configuration with additional entries, and return the flags that select it."""
    path = folder / f"stage-{stage}.json"
    sizes = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": stock_lm.BATCH}
    timed = {"steps_per_print": 1, "wall_clock_breakdown": True}  # as in the trees' own scripts
    zero = {"gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
    path.write_text(json.dumps({**sizes, **timed, **zero, **more}))
    return f"--deepspeed --deepspeed_config {path} --zero-stage {stage}"


def split_into_stages(tree: Path, checkpoint: Path, stages: int) -> None:
    """Run ``stages.py``."""
    call_in_tree(tree, "stages.py", checkpoint, stages)


def to_universal(tree: Path, checkpoint: Path) -> None:
    """Make DeepSpeed write a universal checkpoint next to one of its engine's checkpoints."""
    (package,) = importlib.util.find_spec("deepspeed").submodule_search_locations
    script = Path(package) / "checkpoint" / "ds_to_universal.py"
    folders = f"--input_folder {checkpoint} --output_folder {checkpoint}_universal"
    workers = "--num_extract_workers 1 --num_merge_workers 1"
    call_in_tree(tree, str(script), *folders.split(), *workers.split())


def call_in_tree(tree: Path, script: str, *arguments: object) -> None:
    """Run a script in tests/adaptors/megatron_deepspeed.

    ``megatron`` is the tree there, whose enumerations a checkpoint names.
    """
    command = [sys.executable, str(_SCRIPTS / script), *map(str, arguments)]
    result = warm.run(
        command, env=stock_lm.environment(PYTHONPATH=str(tree)), modules=warm.STOCK, tree=tree, check=False
    )
    assert result.returncode == 0
