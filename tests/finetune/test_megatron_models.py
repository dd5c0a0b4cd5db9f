"""The document's script for a Megatron GPT: 4 processes with its switches train as one without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny, train_runs

pytest.importorskip("megatron.core")
SCRIPT_OF_THE_DOCUMENT = train_runs.DOCUMENTED / "rapidformer_pretrain_megatron_gpt_trainer.py"
CUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
FLAGS = [  # 62 and an end: an odd vocabulary, which two ranks share only if it is padded
    *"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16".split(),
    *"--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 10".split(),
    *"--tokenizer-type NullTokenizer --vocab-size 62 --data-path none --data-impl mmap".split(),
    *"--split 980,20 --lr 1e-2 --lr-decay-style linear --min-lr 0.0 --lr-decay-iters 10".split(),
    *"--weight-decay 1e-2 --clip-grad 1.0 --log-interval 1 --eval-iters 1 --no-plot".split(),
]


def run(log: Path, *flags: str, processes: int = 1) -> tuple[list[float], list[float], str]:
    """Run the script; return losses (the last of validation), gradient norms and what was printed."""
    words = ["--user-script", str(SCRIPT_OF_THE_DOCUMENT), "--nproc-per-node", str(processes)]
    done = tiny.run("train", *words, *FLAGS, "--json-log", str(log), *flags)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = tiny.rows(log)
    losses = [row["loss"] for row in [*rows, *tiny.rows(log, "validation")]]
    return losses, [row["grad_norm"] for row in rows], done.stdout


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A checkpoint that one process has saved at iteration 2."""
    folder = tmp_path_factory.mktemp("megatron") / "start"
    run(folder.parent / "log", "--zero-1-memory-optimization", "--save", str(folder), "--exit-interval", "2")
    return folder


@pytest.fixture(scope="module")
def single(start) -> tuple[list[float], list[float], str]:
    """What one process makes of the other iterations."""
    return run(start.parent / "one", "--zero-1-memory-optimization", "--load", str(start))


def test_four_processes_train_as_one(start, single, tmp_path):
    switches = "--zero-2-memory-optimization --checkpoint-activations"
    words = [*CUT.split(), *switches.split(), "--load", str(start)]
    losses, norms, said = run(tmp_path / "four", *words, processes=4)
    assert len(losses) == 9
    assert single[0][0] - single[0][7] > 0.2, "the run must learn, or curves say nothing"
    assert losses == pytest.approx(single[0], rel=1e-5)
    assert norms == pytest.approx(single[1], rel=1e-4)
    assert "are sharded over 1 data-parallel rank(s)" in said
    assert "tensor model parallel size 2, pipeline model parallel size 2" in said


def test_the_documents_command_line_trains_in_16_bits(start, single, tmp_path):
    switches = "--zero-2-memory-optimization --checkpoint-activations --mixed-precision"
    words = [*CUT.split(), *switches.split(), "--load", str(start)]
    losses, norms, _ = run(tmp_path / "four", *words, processes=4)
    assert losses == pytest.approx(single[0], rel=1e-2)
    assert norms == pytest.approx(single[1], rel=0.15)


SCRIPT = """
import torch
from rapidformer import PreTrainer, RapidformerEngine, megatron_gpt

class Mine(PreTrainer):
    def train_valid_test_datasets_provider(self, sizes):
        return [{"text": torch.arange(17)}] * 8, None, None
    def model_optimizer_lr_scheduler_provider(self):
        return MODEL
    def run_forward_step(self, data_iterator, model):
        return next(data_iterator)

Mine(engine=RapidformerEngine()).train()
"""


ENDS = (
    f"""
import sys
sys.path.insert(0, {str(train_runs.DOCUMENTED)!r})
"""
    + """
import torch
from yourmodel import GPTModel  # without dropout
from rapidformer import PreTrainer, RapidformerEngine
from rapidformer import get_ltor_masks_and_position_ids, get_tokenizer

def text(row):
    "A window of 17 tokens; of the first 16 some are ends of documents, up to 14 of them."
    tokens = (7 * row + torch.arange(17)) % 60
    tokens[: 2 * (row % 8)] = get_tokenizer().eod
    return {"text": tokens}

class Mine(PreTrainer):
    def train_valid_test_datasets_provider(self, sizes):
        rows = [text(row) for row in range(sizes[0])]
        return rows, rows[:8], None
    def model_optimizer_lr_scheduler_provider(self):
        return GPTModel(), None, None
    def run_forward_step(self, data_iterator, model):
        tokens = next(data_iterator)["text"]
        mask, counted, places = get_ltor_masks_and_position_ids(
            tokens[:, :-1], get_tokenizer().eod, False, False, True)
        losses = model(tokens[:, :-1].contiguous(), places, mask, labels=tokens[:, 1:].contiguous())
        return (losses * counted).sum() / counted.sum()

OWN
Mine(engine=RapidformerEngine()).train()
"""
)
OWN = """
def label_counts(self, batch):
    return int((batch["text"][:, :-1] != get_tokenizer().eod).sum())
Mine.label_counts = label_counts
"""


@pytest.mark.parametrize("own", ["", OWN], ids=["by the flag", "by the template"])
def test_ends_of_documents_do_not_weigh(own, tmp_path):
    """A batch taken whole against micro-batches of few rows, on one rank, two, and two stages."""
    (tmp_path / "mine.py").write_text(ENDS.replace("OWN", own))
    words = ["--user-script", str(tmp_path / "mine.py"), *FLAGS, "--train-iters", "3"]
    words += ["--zero-1-memory-optimization", *([] if own else ["--eod-mask-loss"])]

    def trained(name, processes, *flags):
        log = ["--json-log", str(tmp_path / name), "--nproc-per-node", str(processes)]
        done = tiny.run("train", *words, *log, *flags)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        rows, validation = tiny.rows(tmp_path / name), tiny.rows(tmp_path / name, "validation")
        return [row["loss"] for row in [*rows, *validation]], [row["grad_norm"] for row in rows]

    start = str(tmp_path / "start")
    trained("begun", 1, "--micro-batch-size", "8", "--save", start, "--exit-interval", "1")
    losses, norms = trained("whole", 1, "--micro-batch-size", "8", "--load", start)
    assert (len(losses), len(norms)) == (3, 2)
    stages = ("--micro-batch-size", "2", "--pipeline-model-parallel-size", "2")
    for name, processes, *flags in (
        ("rows", 1, "--micro-batch-size", "1"),
        *([] if own else [("ranks", 2, "--micro-batch-size", "1"), ("stages", 2, *stages)]),
    ):
        found = trained(name, processes, *flags, "--load", start)
        assert found[0] == pytest.approx(losses, rel=2e-6), name
        assert found[1] == pytest.approx(norms, rel=1e-5), name


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [
        (
            "torch.nn.Linear(2, 2), None, None",
            "",
            "Linear does not support --tensor-model-parallel-size or --pipeline-model-parallel-size",
        ),
        ("megatron_gpt(), None, None", "--fsdp-memory-optimization", "data parallelism only"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(tmp_path, model, flags, said):
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT.replace("MODEL", model))
    words = ["--user-script", str(script), "--nproc-per-node", "2", "--pipeline-model-parallel-size", "2"]
    done = tiny.run("train", *words, *FLAGS, *flags.split())
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gradient_that_is_no_number_ends_it_in_one_line(tmp_path):
    flags = [*FLAGS, "--lr", "1e30", "--clip-grad", "0", "--log-interval", "100", "--save", str(tmp_path)]
    done = tiny.run("train", "--user-script", str(SCRIPT_OF_THE_DOCUMENT), *flags)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "megatron-npu train: the gradient norm is" in done.stderr.splitlines()[-1]
    assert "--no-check-for-nan-in-loss-and-grad" not in done.stderr  # which train does not have
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("iter_*"))
