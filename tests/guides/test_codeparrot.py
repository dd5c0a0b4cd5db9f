"""docs/tutorials/codeparrot.md on a Megatron-LM 285068c8: its commands in order, with small numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_npu.upstream import megatrons
from tests.conftest import ROOT, checkout
from tests.guides import page as pages
from tests.support import ports, stock_lm

PAGE = ROOT / "docs" / "tutorials" / "codeparrot.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of Megatron-LM, where a reader types."""
    tree = checkout("megatron_lm", megatrons.LEGACY_VERSION)
    copy = tmp_path_factory.mktemp("codeparrot") / "Megatron-LM"
    return shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))


@pytest.fixture(scope="module")
def outputs(folder: Path) -> dict[int, str]:
    """What each block of the page prints."""
    for package in ("transformers", "accelerate", "tensorboard"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    smaller = {
        '.glob("*.py")': '.glob("[a-c]*.py")',
        "vocab_size=2000": "vocab_size=400",
        "--workers 32": "--workers 2",
        "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
        "--max-position-embeddings 128": "--num-layers 1 --hidden-size 32 --num-attention-heads 2 "
        "--seq-length 64 --max-position-embeddings 64",
        "--lr 0.002 --lr-warmup-iters 20 --train-iters 400 --lr-decay-iters 400": "--lr 0.02 "
        "--lr-warmup-iters 2 --train-iters 40 --lr-decay-iters 40 --eval-iters 1",
        "--log-interval 50": "--log-interval 10",
        "MASTER_PORT=6001": f"MASTER_PORT={ports.free_port()}",
    }
    return pages.run(PAGE, folder, smaller)


def test_the_data_and_the_model_are_python(outputs: dict[int, str], folder: Path) -> None:
    assert "codeparrot_content_document.bin and .idx" in pages.output_of(PAGE, outputs, "--json-keys content")
    assert len(json.loads((folder / "vocab.json").read_text())) == 400
    shown = pages.output_of(PAGE, outputs, "torch.distributed.launch")
    assert "megatron_lm 285068c8 · cpu/gloo" in shown
    losses = stock_lm.losses(shown)
    assert list(losses) == [10, 20, 30, 40]
    assert losses[40] < losses[10] - 0.5
    assert "validation loss at the end of training" in shown


def test_tensorboard_has_the_curves(outputs: dict[int, str], folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "experiments" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("lm loss")][-1] == 40


def test_transformers_and_megatron_write_the_same(outputs: dict[int, str]) -> None:
    """The converted model in Transformers' pipeline, and Megatron's own checkpoint, go on in the same way."""
    converted = pages.output_of(PAGE, outputs, "megatron-npu convert")
    assert "logits of both models" in converted
    files = {"model.safetensors", "config.json", "vocab.json", "merges.txt", "README.md"}
    assert files <= set(converted.split())
    written = pages.output_of(PAGE, outputs, 'pipe("def hello_world():"')
    assert "GPT2LMHeadModel" in written
    _, begin, rest = written.partition("def hello_world():")
    assert len(rest) > 40, "so many tokens, be they blanks"
    generated = pages.output_of(PAGE, outputs, "megatron-npu generate")
    assert begin + rest.rstrip("\n") in generated
    assert "on cpu" in pages.output_of(PAGE, outputs, 'device_map="auto"')
