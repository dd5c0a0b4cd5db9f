"""LAMBADA with the stock task: the same figures from every layout and on every device.

A model with GPT-2's vocabulary has learned the endings of some passages by heart; most of those asked it has
never seen. The stock ``tools/checkpoint_util.py`` cuts its one checkpoint into the other layouts.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_npu.data.preprocessing import indexed_dataset
from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from megatron_npu.evaluation import lambada
from tests.adaptors.megatron_lm.test_runs import load, tensors
from tests.conftest import LONGEST
from tests.support import bytecode, stock_lm, tiny, warm
from tests.support.simulated import ROOT, run_simulated, unavailable

LEARNED, EXAMPLES = 12, 28  # passages
ENDING, LENGTH = 12, 64  # tokens: of the ending that is learned, of the longest passage
MODEL = (
    f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 4 --global-batch-size 4 "
    f"--seq-length {LENGTH} --max-position-embeddings {LENGTH} --tokenizer-type GPT2BPETokenizer "
    f"{stock_lm.TOOL_MULTIPLE}"
)
STEPS = 150
TRAINING = (
    f"--train-iters {STEPS} --lr-decay-iters {STEPS} --lr 5e-3 --split 100,0,0 --eval-iters 0 "
    f"--log-interval 10 --save-interval {STEPS} --micro-batch-size 2 --global-batch-size 2"
)
LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2-pp2": (2, 2)}


@pytest.fixture(scope="module")
def passages() -> list[str]:
    """Lines of the LAMBADA test set."""
    for folder in (ROOT.parent / "shared" / "data", ROOT / "tests_gpt"):
        for name in ("lambada_test.jsonl", "lambada_test.json"):
            if (folder / name).is_file():
                return (folder / name).read_text().splitlines(keepends=True)
    pytest.skip("no lambada_test.jsonl in ../shared/data, no lambada_test.json in tests_gpt")


@pytest.fixture(scope="module")
def folder(gpt2_vocab, passages, tmp_path_factory) -> Path:
    """A folder with the passages asked (``asked.json``) and a dataset of the endings to learn (``text``)."""
    folder = tmp_path_factory.mktemp("lambada")
    tokenizer = GPT2Tokenizer(gpt2_vocab.vocab_file, gpt2_vocab.merge_file)
    short = [line for line in passages if len(tokenizer.encode(json.loads(line)["text"])) < LENGTH]
    (folder / "asked.json").write_text("".join(short[:EXAMPLES]))
    (folder / "vocab.json").symlink_to(gpt2_vocab.vocab_file)
    (folder / "merges.txt").symlink_to(gpt2_vocab.merge_file)
    with indexed_dataset.Writer(str(folder / "text"), np.dtype(np.uint16)) as writer:
        for line in short[:LEARNED]:
            ending = [*tokenizer.encode(json.loads(line)["text"])[-ENDING:], tokenizer.eod]
            lengths, sequences = np.array([len(ending)], np.int32), np.array([1], np.int64)
            writer.add(np.array(ending, np.uint16).tobytes(), lengths, sequences)
        writer.finish()
        indexed_dataset.publish([writer])
    return folder


def flags(folder: Path) -> list[str]:
    """Return the flags of the model."""
    return [*stock_lm.flags(folder), *MODEL.split()]


class Checkpoints:
    """The one trained model in every layout; made when asked for."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.checkout, self.folder = checkout, folder
        command = [*flags(folder), *f"{TRAINING} --save {folder}/1x1".split()]
        trained = stock_lm.run(checkout / "pretrain_gpt.py", command, timeout=LONGEST)
        losses = stock_lm.losses(stock_lm.succeeded(trained))
        assert losses[STEPS] < 1, losses

    def path(self, tensor: int, pipeline: int) -> Path:
        """Return the checkpoint folder of a layout."""
        path = self.folder / f"{tensor}x{pipeline}"
        if not path.exists():
            stock_lm.change_layout(self.checkout, self.folder / "1x1", path, tensor, pipeline)
        return path


@pytest.fixture(scope="module")
def checkpoints(checkout, folder) -> Checkpoints:
    return Checkpoints(checkout, folder)


def ask(checkpoints: Checkpoints, device: str, layout: tuple[int, int], strict: bool) -> tuple[int, int]:
    """Return (right, examples) of the stock task in a layout on a device."""
    (tensor, pipeline), folder = layout, checkpoints.folder
    task = f"--task LAMBADA --valid-data {folder}/asked.json --no-load-optim --no-load-rng"
    sizes = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
    # with it and stages upstream all-reduces an embedding in host memory, which no backend of an NPU can
    model = [flag for flag in flags(folder) if flag != "--use-cpu-initialization"]
    command = [*model, *f"{task} {sizes} --load {checkpoints.path(tensor, pipeline)}".split()]
    command += ["--strict-lambada"] if strict else []
    script, processes = checkpoints.checkout / "tasks" / "main.py", tensor * pipeline
    if device == "cpu":
        result = stock_lm.run(script, command, processes=processes, timeout=LONGEST)
        return stock_lm.accuracy(stock_lm.succeeded(result))
    line = tiny.command("run", str(script), *command, processes=processes)
    named = {"MEGATRON_NPU_DEVICE": "npu", **bytecode.elsewhere()}  # no other device will do
    modules, tree = warm.STOCK, checkpoints.checkout
    result = run_simulated(*line, timeout=LONGEST, modules=modules, tree=tree, **named)
    assert result.returncode == 0, result.stdout[-5000:]
    return stock_lm.accuracy(result.stdout)


@pytest.fixture(scope="module")
def expected(checkpoints) -> dict[bool, tuple[int, int]]:
    """What one process on the CPU answers, strict and not."""
    figures = {strict: ask(checkpoints, "cpu", (1, 1), strict) for strict in (True, False)}
    assert figures[True][1] == figures[False][1] == EXAMPLES
    assert 0 < figures[True][0] < EXAMPLES / 2, "what was learned is known in part, the rest is not"
    assert 0 < figures[False][0] < EXAMPLES / 2
    return figures


USUAL = [("cpu", "tp2-pp2", True), ("npu", "tp1", False), ("npu", "tp2", True), ("npu", "pp2", False)]
GRID = [
    (device, layout, strict) for device in ("cpu", "npu") for layout in LAYOUTS for strict in (True, False)
]


@pytest.mark.parametrize(
    ("device", "layout", "strict"), GRID if os.environ.get("TEST_EVERY_LAYOUT") == "1" else USUAL
)
def test_figures_do_not_depend_on_layout_and_device(checkpoints, expected, device, layout, strict):
    if device == "npu" and unavailable():
        pytest.skip(unavailable())
    assert ask(checkpoints, device, LAYOUTS[layout], strict) == expected[strict]


def test_changing_the_layout_there_and_back_changes_no_bit(checkpoints):
    """Two tensor parts in two stages, and again one: the weights are those that were trained."""
    back = checkpoints.folder / "back"
    stock_lm.change_layout(checkpoints.checkout, checkpoints.path(2, 2), back, 1, 1)
    name = Path(f"iter_{STEPS:07d}", "mp_rank_00", "model_optim_rng.pt")
    trained, returned = (dict(tensors(load(path / name)["model"])) for path in (checkpoints.path(1, 1), back))
    assert len(trained) > 20
    assert trained.keys() == returned.keys()
    assert all(torch.equal(tensor, returned[key]) for key, tensor in trained.items())


@pytest.mark.parametrize("strict", [True, False])
def test_our_command_knows_the_same_examples(checkpoints, strict, monkeypatch):
    """One by one, from the files of four ranks where the stock task reads that of one."""
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    folder, task = checkpoints.folder, "--task LAMBADA --no-load-optim --no-load-rng --micro-batch-size 1"
    data = f"--valid-data {folder}/asked.json --load {checkpoints.path(1, 1)}"
    command = [*flags(folder), *f"{task} {data}".split(), *(["--strict-lambada"] if strict else [])]
    script = Path(__file__).parent / "each_example.py"
    output = stock_lm.succeeded(stock_lm.run(script, command, MEGATRON_LM_PATH=str(checkpoints.checkout)))
    told = [json.loads(line) for line in re.findall(r"passage: (.*)", output)]
    vocab, merges = str(folder / "vocab.json"), str(folder / "merges.txt")
    rows = lambada.found(
        str(checkpoints.path(2, 2)),
        str(folder / "asked.json"),
        cut="word" if strict else "token",
        batch=1,
        vocab_file=vocab,
        merge_file=merges,
    )
    found = {(*row.example.context, *row.example.answer): row.correct for row in rows}
    expected = {
        tokens: right for right, padded in told for tokens in found if tuple(padded[: len(tokens)]) == tokens
    }
    assert found == expected
    assert len(found) == len(told) == EXAMPLES
    assert 0 < sum(found.values()) < EXAMPLES / 2


@pytest.mark.parametrize("load", ["there/but/empty", "not/there"])
def test_a_checkpoint_that_is_not_there_is_not_evaluated(checkout, data, tmp_path, load):
    """Upstream warns, evaluates random weights and ends with exit code 0."""
    (tmp_path / "there" / "but" / "empty").mkdir(parents=True)
    passages = tmp_path / "asked.json"
    passages.write_text('{"text": "a b c d"}\n')
    task = f"--task LAMBADA --valid-data {passages} --no-load-optim --no-load-rng --load {tmp_path / load}"
    command = [*stock_lm.flags(data), *task.split(), "--tokenizer-type", "GPT2BPETokenizer"]
    done = stock_lm.run(checkout / "tasks" / "main.py", command)
    assert done.returncode == 2
    assert f"wrote with --save, but {tmp_path / load} contains no checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
