"""The commands of the guide, in the folders that it describes: this project cloned inside Megatron-LM.

They are run as they stand in the guide. Only sizes come from the environment.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_npu.preprocessing import indexed_dataset
from tests.adaptors.megatron_lm import runs
from tests.end_to_end.tiny import ROOT

PRETRAIN = [
    "bash pretrain_gpt_distributed.sh",
    "bash pretrain_gpt_distributed_fp16.sh --pre=65536 --next=65536 --shape_order=SBH",
    "bash pretrain_gpt_distributed_fp16.sh --pre=65536 --next=65536 --shape_order=BSH",
    "bash pretrain_gpt_distributed_fp16.sh --pre=2048 --next=0 --shape_order=SBH",
    "bash pretrain_gpt_distributed_fp16.sh --pre=2048 --next=0 --shape_order=BSH",
    "bash pretrain_gpt_distributed_bf16.sh --pre=65536 --next=65536 --shape_order=SBH",
    "bash pretrain_gpt_distributed_bf16.sh --pre=65536 --next=65536 --shape_order=BSH",
    "bash pretrain_gpt_distributed_bf16.sh --pre=2048 --next=0 --shape_order=SBH",
    "bash pretrain_gpt_distributed_bf16.sh --pre=2048 --next=0 --shape_order=BSH",
]
TEST = [
    "bash test_gpt_distributed.sh",
    "bash test_gpt_distributed_fp16.sh --pre=65536 --next=65536 --shape_order=SBH",
    "bash test_gpt_distributed_fp16.sh --pre=65536 --next=65536 --shape_order=BSH",
    "bash test_gpt_distributed_fp16.sh --pre=2048 --next=0 --shape_order=SBH",
    "bash test_gpt_distributed_fp16.sh --pre=2048 --next=0 --shape_order=BSH",
    "bash test_gpt_distributed_bf16.sh --pre=65536 --next=65536 --shape_order=SBH",
    "bash test_gpt_distributed_bf16.sh --pre=65536 --next=65536 --shape_order=BSH",
    "bash test_gpt_distributed_bf16.sh --pre=2048 --next=0 --shape_order=SBH",
    "bash test_gpt_distributed_bf16.sh --pre=2048 --next=0 --shape_order=BSH",
]
PAIRS = list(zip(PRETRAIN, TEST, strict=True))
SAMPLE = "bash test_gpt_distributed_sample.sh"

SIZES = {
    "SEQ_LENGTH": "64",
    "NUM_LAYERS": "1",
    "NUM_HEADS": "2",
    "HIDDEN_SIZE": "32",
    "TRAIN_ITERS": "30",
    "LR": "2e-2",
    "INITIAL_LOSS_SCALE": "4096",
}
# longer than the window of 2,048 tokens, which else is no window
LONG = {**SIZES, "SEQ_LENGTH": "2304", "TRAIN_ITERS": "24"}
WORD = 257  # " a", nine in ten words of the texts: what a model learns first
KNOWN = [
    "b a a c a",
    "c a d a",
    "a a a",
    "x y a z a",
    "a b c d e a",
    "m a a a n a",
    "t a u a v a",
    "f g h i j k a",
]
LINES = [*KNOWN, "a b a q", "a a a r", "c a z", "a k a s t"]


Run = Callable[..., subprocess.CompletedProcess[str]]


class Guide:
    """The folders of the guide, and its commands run there.

    Args:
        checkout: a Megatron-LM, which is copied.
        folder: an empty folder.
        run: runs a command given as its words, with changes to the environment given by name.
        sizes: of the model and its training, as environment variables.
    """

    def __init__(self, checkout: Path, folder: Path, run: Run, sizes: dict[str, str]) -> None:
        self._run, self.sizes = run, sizes
        megatron = folder / "Megatron-LM"
        shutil.copytree(checkout, megatron, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        project = megatron / "megatron_npu"
        self.scripts = lay_out_project(project)
        write_lambada(self.scripts)

    def execute(self, command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run a command in ``tests_gpt``, as a user's shell would; return the finished process."""
        line = f"cd '{self.scripts}' && {command}"
        own = {"PYTHONDONTWRITEBYTECODE": "1", "MEGATRON_LM_PATH": ""}
        return self._run("bash", "-c", line, **{**own, **self.sizes, **changes})

    @functools.cache  # noqa: B019 - lives as long as the tests that share it
    def pair(self, pretrain: str, test: str) -> tuple[dict[int, float], tuple[int, int]]:
        """Train, then evaluate what was trained; return the losses and (right, examples)."""
        shutil.rmtree(self.scripts / "checkpoint", ignore_errors=True)
        trained = runs.succeeded(self.execute(pretrain))
        assert "Small preset on 1 x " in trained
        assert "megatron_lm 285068c8" in trained
        return runs.losses(trained), runs.accuracy(runs.succeeded(self.execute(test)))


def lay_out_project(project: Path) -> Path:
    """Lay this project out in a folder as a clone would be, with a dataset; return its ``tests_gpt``."""
    project.mkdir()
    for name in ("megatron_npu", "patches", "scripts"):
        (project / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "tests_gpt", project / "tests_gpt", ignore=shutil.ignore_patterns("checkpoint*"))
    write_dataset(project / "dataset" / "gpt")
    return project / "tests_gpt"


def write_dataset(folder: Path) -> None:
    """Write the vocabulary and the dataset where the scripts look for them."""
    folder.mkdir(parents=True)
    tokens, merges = runs.write_vocabulary(folder, merges=["\u0120 a"])
    tokens.rename(folder / "gpt2-vocab.json")
    merges.rename(folder / "gpt2-merges.txt")
    generator = np.random.RandomState(0)
    with indexed_dataset.Writer(str(folder / "my-gpt_text_document"), np.dtype(np.uint16)) as writer:
        for _ in range(200):
            words = np.where(generator.rand(200) < 0.9, WORD, generator.randint(256, size=200))
            writer.add(words.astype(np.uint16).tobytes(), np.array([200], np.int32), np.array([1], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])


def write_lambada(scripts: Path) -> None:
    """Write the passages where the scripts look for them."""
    (scripts / "lambada_test.json").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))


def check(commands: Guide, pretrain: str, test: str) -> None:
    """Check that a pair of commands has trained, and has evaluated the trained model."""
    losses, figures = commands.pair(pretrain, test)
    assert sorted(losses) == list(range(1, 1 + int(commands.sizes["TRAIN_ITERS"]))), "no step is skipped"
    assert losses[max(losses)] < 0.5 * losses[1]
    check_figures(figures)


def check_figures(figures: tuple[int, int]) -> None:
    """Check (right, examples) of a model that begins to know the commonest word; untrained it knows none."""
    right, examples = figures
    assert examples == len(LINES)
    assert 0 < right <= len(KNOWN)


def losses_of(commands: Guide, precision: str, window: str) -> tuple[dict[int, float], dict[int, float]]:
    """Return the losses with SBH and with BSH that the commands of a precision with ``--pre=window`` gave."""
    chosen = [pair for pair in PAIRS if f"_{precision}.sh --pre={window} " in pair[0]]
    sbh, bsh = (commands.pair(*pair)[0] for pair in chosen)
    return sbh, bsh
