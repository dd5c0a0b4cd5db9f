"""docs/tutorials/gpt2-345m.md on bigscience's Megatron-DeepSpeed: its commands in order, with small sizes."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from megatron_npu.upstream import megatrons
from tests.conftest import ROOT, checkout
from tests.guides import page as pages
from tests.support import ports, stock_lm

pytest.importorskip("deepspeed")
pytest.importorskip("nltk", reason="upstream's tool needs nltk even where no sentences are split")

PAGE = ROOT / "docs" / "tutorials" / "gpt2-345m.md"
FLAGS = """
--tensor-model-parallel-size --pipeline-model-parallel-size --num-layers --hidden-size
--num-attention-heads --micro-batch-size --global-batch-size --seq-length --max-position-embeddings
--train-iters --lr-decay-iters --save --load --data-path --vocab-file --merge-file --data-impl --split
--distributed-backend --lr --lr-decay-style --min-lr --weight-decay --clip-grad --lr-warmup-fraction
--checkpoint-activations --log-interval --save-interval --eval-interval --eval-iters --fp16
""".split()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What each block of the page prints, in a tree with a vocabulary of bytes and documents of one line."""
    tree = checkout("megatron_deepspeed", megatrons.BIGSCIENCE_VERSION)
    folder = tmp_path_factory.mktemp("gpt2") / "Megatron-DeepSpeed"
    shutil.copytree(tree, folder, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    vocab_file, merge_file = stock_lm.write_vocabulary(folder)
    vocab_file.rename(folder / "gpt2-vocab.json")
    merge_file.rename(folder / "gpt2-merges.txt")
    lines = [{"text": f"Line {number} of a text, and what follows. " * 8} for number in range(60)]
    (folder / "oscar-1GB.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    smaller = {
        "--workers 8": "--workers 2",
        "LENGTH=64": "LENGTH=16",
        "--train-iters 20 --lr-decay-iters 20": "--train-iters 20 --lr-decay-iters 20 --lr 1e-2",
        "MASTER_PORT=6000": f"MASTER_PORT={ports.free_port()}",
        "GPUS_PER_NODE=8 ": "GPUS_PER_NODE=2 ",
        "--global-batch-size 64": "--global-batch-size 16",
        "deepspeed $PWD/tools": "python $PWD/tools",  # its launcher starts two more processes
    }
    return pages.run(PAGE, folder, smaller, trained=folder / "checkpoints" / "gpt2")


def test_every_flag_of_the_guide_is_on_the_page() -> None:
    [script] = [block.text for block in pages.blocks(PAGE) if "cat > pretrain_gpt2.sh" in block.text]
    assert re.findall(r"^    (--[a-z0-9-]+)", script, re.MULTILINE) == FLAGS


def test_the_data(outputs: dict[int, str]) -> None:
    """The checkout's own tool, with the guide's nine flags, and the files where the guide moves them."""
    assert "Time to startup" in pages.output_of(PAGE, outputs, "tools/preprocess_data.py")
    assert pages.output_of(PAGE, outputs, "mv meg-gpt2* ./data").strip() == ""


def test_one_card(outputs: dict[int, str]) -> None:
    """Started by torch.distributed.launch, with the guide's flags, the model learns."""
    shown = pages.output_of(PAGE, outputs, "nohup sh ./pretrain_gpt2.sh")
    assert "megatron_deepspeed 8387ae17 · cpu/gloo" in shown
    losses = stock_lm.losses(shown)
    assert list(losses) == [10, 20]
    assert losses[20] < losses[10] - 0.5
    assert "valid loss at the end of training" in shown
    assert "latest_checkpointed_iteration.txt" in shown


def test_samples_and_a_conversation(outputs: dict[int, str]) -> None:
    shown = pages.output_of(PAGE, outputs, "cat > generate_text.sh")
    samples = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    assert len(samples) == 2
    assert all(sample["text"] for sample in samples)
    talk = pages.output_of(PAGE, outputs, "cat > interactive_text.sh")
    assert talk.count("Context prompt (stop to exit) >>> ") == 2
    assert "Context: huawei" in talk


def test_several_cards(outputs: dict[int, str]) -> None:
    shown = pages.output_of(PAGE, outputs, "GPUS_PER_NODE=8 sh")
    assert "The module torch.distributed.launch is deprecated" in shown
    assert "using world size: 2, data-parallel-size: 2" in shown
    assert "setting number of micro-batches to constant 2" in shown
    assert list(stock_lm.losses(shown)) == [1, 2, 3, 4]
