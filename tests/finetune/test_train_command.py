"""``megatron-npu train``: what is refused, in one line; how it starts its ranks; how it ends."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_npu.base import given_files
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.finetune.model import prepare
from megatron_npu.finetune.rapidformer import engine, state, templates
from megatron_npu.finetune.run import arguments, ranks
from megatron_npu.pretrain.report.dashboard import snapshot
from tests.conftest import LONGEST, ROOT
from tests.support import tiny, train_runs, warm
from tests.support.ports import free_port

SCRIPTS = Path(__file__).parent / "scripts"
SLOW = SCRIPTS / "slow.py"

# The document's command lines; the names of models and data are of no matter to the parser.
FINE_TUNING = """--task sequence_classification --pretrained-model-name-or-path 'bert-base-cased'
--data-path glue --data-name mrpc --epochs 3 --micro-batch-size 16 --global-batch-size 64 --lr 2e-5
--lr-decay-style linear --lr-warmup-iters 100 --weight-decay 1e-2 --clip-grad 1.0 --mixed-precision
--onnx-runtime-training --zero-1-memory-optimization"""
PRE_TRAINING = """--task pretraining --pretrained-model-name-or-path 'bert-base-uncased' --num-layers 12
--hidden-size 768 --num-attention-heads 12 --micro-batch-size 16 --global-batch-size 128 --seq-length 512
--tokenizer-type BertWordPieceLowerCase --max-position-embeddings 512 --train-iters 100
--data-path book_wiki_owtv2_small_text_sentence --vocab-file bert-en-uncased-vocab.txt --data-impl mmap
--split 980,20 --lr 1e-3 --lr-decay-style linear --min-lr 0.0 --lr-decay-iters 2000 --weight-decay 1e-2
--clip-grad 1.0 --lr-warmup-fraction .01 --mixed-precision --onnx-runtime-training
--fsdp-memory-optimization"""
MEGATRON = f"""--user-script {SLOW} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
--num-layers 12 --hidden-size 768 --num-attention-heads 12 --micro-batch-size 16 --global-batch-size 128
--seq-length 512 --tokenizer-type GPT2BPETokenizer --max-position-embeddings 512 --train-iters 100
--data-path book_wiki_owtv2_small_text_sentence --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
--data-impl mmap --split 980,20 --lr 1e-3 --lr-decay-style linear --min-lr 0.0 --lr-decay-iters 2000
--weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 1 --zero-2-memory-optimization
--checkpoint-activations --mixed-precision"""

FEW = "--task causal_lm --pretrained-model-name-or-path x --data-path x --epochs 1"


def parsed(line: str):
    args = arguments.parse(shlex.split(line))
    args = arguments.with_ranks(args, ranks.Ranks(world_size=4))
    return args


def test_the_document_s_command_lines_are_read() -> None:
    args = state.ScriptArgs(parsed(FINE_TUNING))
    assert (args.load, args.dataset_path, args.dataset_name) == ("bert-base-cased", "glue", "mrpc")
    assert (args.mixed_precision, args.sharding, args.graph_optimization) == ("bf16", "zero-1", True)
    assert args.num_microbatches == 1
    args = parsed(PRE_TRAINING)
    assert (args.num_microbatches, args.sharding, args.split) == (2, "fsdp", "980,20")
    assert (args.mask_prob, args.short_seq_prob, args.mmap_warmup) == (0.15, 0.1, False)
    args = parsed(MEGATRON)
    assert (args.data_parallel_size, args.num_microbatches, args.sharding) == (1, 8, "zero-2")
    assert args.checkpoint_activations
    assert not any((args.reset_position_ids, args.reset_attention_mask, args.eod_mask_loss))


def test_the_command_has_the_document_s_name_too(monkeypatch, capsys) -> None:
    assert 'rapidformer = "megatron_npu.commands.cli:rapidformer"' in (ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr(sys, "argv", ["rapidformer", "--task", "cooking"])
    assert cli.rapidformer() == 2
    assert "--task must be causal_lm," in capsys.readouterr().err


def test_a_data_set_may_be_named_alone() -> None:
    args = parsed(FINE_TUNING.replace("--data-path glue --data-name mrpc", "--dataset-name imdb"))
    assert (args.data_path, args.data_name) == ("imdb", None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "neither --task nor --user-script"),
        (
            "--task sequence_classification --data-path x --epochs 1",
            "requires --pretrained-model-name-or-path",
        ),
        ("--task causal_lm --pretrained-model-name-or-path x --epochs 1", "requires --data-path"),
        ("--task cooking", "--task must be causal_lm, "),
        (
            f"--user-script {SLOW} --epochs 1 --micro-batch-size 3 --global-batch-size 4",
            "--global-batch-size must be a multiple of --micro-batch-size 3 x 1",
        ),
        (f"--user-script {SLOW} --epochs 1 --min-lr 1 --lr 0.1", "--min-lr 1 is above --lr 0.1"),
        (
            f"--user-script {SLOW} --epochs 1 --lr-warmup-iters 3 --lr-warmup-fraction .1",
            "are mutually exclusive",
        ),
        (
            f"--user-script {SLOW} --zero-1-memory-optimization --fsdp-memory-optimization",
            "--zero-1-memory-optimization and --fsdp-memory-optimization are mutually exclusive",
        ),
        (f"--user-script {SLOW} --save-interval 3", "--save-interval requires --save"),
        (
            f"--user-script {SLOW} --epochs 1 --global-batch-size 16",
            "has 8 samples, but it must have at least --global-batch-size",
        ),
        (f"--user-script {SLOW}", "neither --epochs nor --train-iters"),
        (
            f"{FEW.replace('causal_lm', 'pretraining')} --train-iters 3",
            "--epochs 1 cannot be used with --task pretraining",
        ),
        ("--user-script nowhere.py", "must be a Python file, but nowhere.py does not exist"),
        (
            r"--task sequence_classification \  ",
            "a backslash in the command is followed by a space or a comment",
        ),
        (
            f"--user-script {SLOW} --tensor-model-parallel-size 2 --nproc-per-node 1",
            "the number of processes must be a multiple of 2",
        ),
        (
            f"--user-script {SLOW} --lr-warmup-iters 8 --lr-decay-iters 8",
            "the warm-up must be shorter than the decay, but --lr-warmup-iters is",
        ),
        (f"--user-script {SLOW} --seed -1", "--seed must be an integer from 0 to 2^32 - 1"),
        (
            f"--user-script {SLOW} --adam-beta1 1",
            "--adam-beta1 must be a number of at least 0 and less than 1, but got 1",
        ),
        (f"--user-script {SLOW} --train-iters 1 --save {SLOW}", "slow.py is a file. Use another path"),
        (
            f"--user-script {SLOW} --train-iters 1 --json-log {SLOW}/log",
            "slow.py is a file. Use another path",
        ),
        (
            f"--user-script {SLOW} --train-iters 1 --json-log {SCRIPTS}",
            "scripts is a directory. Use another path",
        ),
        (
            f"--user-script {SLOW} --train-iters 1 --load {SLOW}",
            "slow.py is a file",
        ),
        (
            f"--user-script {SLOW} --train-iters 1 --load {SCRIPTS}",
            "scripts contains no checkpoint",
        ),
        (f"--user-script {SLOW} --train-iters 1 --json-log /proc/log", "/proc cannot be written ("),
        (
            f"--user-script {SLOW} --train-iters 1 --json-log /proc/version",
            "/proc/version cannot be written (",
        ),
        (f"--user-script {SLOW} --train-iters 1 --tensorboard-dir /proc/board", "/proc cannot be written ("),
        (f"--user-script {SLOW} --train-iters 1 --save ''", "--save must not be empty"),
        (f"--user-script {SLOW} --train-iters 1 --nproc-per-node 100000", "--nproc-per-node 100000 needs 2"),
        (
            f"--user-script {SLOW} --train-iters 1 --adam-eps 0",
            "--adam-eps must be a positive number, but got 0",
        ),
        (
            f"{FEW} --columns text=a text=b",
            "--columns text=a text=b: each role must be given only one column, but text",
        ),
        (
            f"{FEW} --columns text=a --columns text=b",
            "--columns text=a text=b: each role must be given only one column, but",
        ),
        (
            f"{FEW} --columns text=a label=a",
            "--columns text=a label=a: each role must have a different column",
        ),
        (f"{FEW} --num-layers 3", "--num-layers is not used by --task causal_lm; it applies only to"),
        (f"{FEW} --vocab-file x", "it applies only to --task pretraining. Remove it"),
        (f"{FEW} --columns label=x --num-beams 2", "--num-beams is not used by --task causal_lm"),
        (
            f"{FEW.replace('causal_lm', 'seq2seq')} --num-beams 2",
            "--num-beams requires --predict-with-generate, because beams are used only for generated outputs",
        ),
        (f"{FEW} --reset-position-ids", "it applies only to a script. Remove it, or pass --user-script"),
        (
            "--task causal_lm --pretrained-model-name-or-path x --data-path x --epochs 1 "
            "--tensor-model-parallel-size 2",
            "with --task causal_lm",
        ),
    ],
)
def test_flags_that_cannot_be(line: str, expected: str, capsys) -> None:
    assert cli.main(["train", *shlex.split(line)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert expected in said


SCRIPT = """
import torch
from rapidformer import Finetuner, RapidformerEngine

class Mine(Finetuner):
    def train_valid_test_datasets_provider(self):
        return [torch.ones(2)] * 8, [torch.ones(2)] * 3, None, None
    def model_optimizer_lr_scheduler_provider(self):
        return torch.nn.Linear(2, 1), None, None
    def run_forward_step(self, batch, model):
        return model(batch).mean()
    def run_compute_metrics(self, model, eval_dataloader):
        return {"mean": 1.0}
"""
END = "\nMine(RapidformerEngine()).train()\n"


@pytest.mark.parametrize(
    ("written", "instead", "expected"),
    [
        (
            "[torch.ones(2)] * 3, None, None",
            "None",
            "train_valid_test_datasets_provider must return train_dataset, valid_dataset, test_dataset, "
            "collate_fn, but it returned 2 values",
        ),
        (
            "[torch.ones(2)] * 8, [",
            "iter([torch.ones(2)]), [",
            "must have a length and indexable samples (torch.utils.data.Dataset), but it is a list_iterator",
        ),
        (
            "None, None\n    def model",
            "None, 3\n    def model",
            "must return a function that collates samples into a batch as the fourth value, but it returned "
            "a int",
        ),
        (
            "return torch.nn.Linear(2, 1), None, None",
            "return torch.nn.Linear(2, 1)",
            "must return model, optimizer, lr_scheduler (the last two may be None), but it returned a Linear",
        ),
        (
            "Linear(2, 1), None, None",
            "Linear, None, None",
            "must return a torch.nn.Module as its first value, but it returned a type",
        ),
        (
            "Linear(2, 1), None, None",
            "Linear(2, 1), 3, None",
            "an optimizer, a function that creates one, or No",
        ),
        (
            "Linear(2, 1), None, None",
            "Linear(2, 1), lambda: 3, None",
            "the function that creates the optimizer must accept one argument, the par",
        ),
        (
            "model(batch).mean()",
            "model(batch)",
            "run_forward_step must return the loss as a single value, such as the mean of these values, but "
            "it returned a tensor of shape [8, 1]",
        ),
        (
            "model(batch).mean()",
            "model(batch).mean().item()",
            "run_forward_step must return the loss as a tensor with one element, such as output.loss, but "
            "it returned a float",
        ),
        ("model(batch).mean()", "model(batch).mean().detach()", "a loss that depends on the model's weights"),
        (
            '{"mean": 1.0}',
            '{"mean": "high"}',
            "run_compute_metrics must return a dictionary that maps names to numbers, but it returned a dict",
        ),
        (
            "    def run_forward_step",
            "    def run_backward_step",
            "Mine must define the method run_forward_step, which returns",
        ),
        (
            "model(batch).mean()",
            "model(batch).means()",
            "mine.py failed with AttributeError: 'Tensor' object has ",
        ),
        ("model(batch).mean()", "torch.ones(3) @ batch", "line 11, in run_forward_step"),
        (
            "import torch\n",
            "import torch\nimport nowhere\n",
            "failed with ModuleNotFoundError: No module named 'n",
        ),
        (END, "", "did not create a RapidformerEngine; it must call a template's train() or engine.compose"),
        (
            END,
            "\nRapidformerEngine()\n",
            "did not train anything; it must call a template's train() or engine.compose",
        ),
        (
            "import torch\n",
            "import torch\ndef (\n",
            "mine.py is not a valid Python file: invalid syntax (line 3)",
        ),
        (
            "import torch\n",
            "import torch\n\0\n",
            "is not a valid Python file: source code string cannot contain null bytes",
        ),
        (
            "RapidformerEngine())",
            "3)",
            "Mine must be created with a RapidformerEngine, which its __init__ passes on with "
            "super().__init__(engine=engine), but got int",
        ),
        (
            "class Mine(Finetuner):",
            "class Mine(Finetuner):\n    def __init__(self, engine): pass",
            "Mine must be created with a RapidformerEngine, which its __init__ passes on with "
            "super().__init__(engine=engine), but got no",
        ),
        (
            "datasets_provider(self)",
            "datasets_provider(self, sizes)",
            "(sizes) must accept 0 arguments besides self, but calling it fails: missing a required "
            "argument: 'sizes'",
        ),
        (
            "forward_step(self, batch,",
            "forward_step(self,",
            "must accept 2 arguments besides self, but calling it fails: too many positional arguments",
        ),
        (
            "[torch.ones(2)] * 8",
            "[torch.ones(i + 1) for i in range(8)]",
            "the samples cannot be collated into a batch: stack",
        ),
        (
            "[torch.ones(2)] * 8,",
            "type('D', (list,), {'__len__': lambda self: -1})(),",
            "but it is a D whose length is invalid (__len__() should return >= 0)",
        ),
        (
            "[torch.ones(2)] * 3, None, None",
            "None, None, lambda rows, more: rows",
            "a collate_fn that cannot be called with a list of samples: missing a required argument: 'more'",
        ),
        (
            "Linear(2, 1), None",
            "Linear(2, 1, device='meta'), None",
            "the weight 'weight' of the Linear is on the meta device and has no values",
        ),
        (
            "[torch.ones(2)] * 8",
            "[None] * 8",
            "the samples cannot be collated into a batch: default_collate: batch must cont",
        ),
        (
            "Linear(2, 1), None",
            "ReLU(), None",
            "the model has no weights to train: at least one parameter must require a gradient",
        ),
        (
            "None, None\n    def run",
            "lambda p: None, None\n    def run",
            "the function that creates the optimizer must return the optimizer, but it returned noth",
        ),
        (
            "None, None\n    def run",
            "None, lambda o: 3\n    def run",
            "the function that creates the scheduler must return the scheduler, but it returned int",
        ),
        (
            "None, None\n    def run",
            "torch.optim.SGD([torch.ones(1)]), None\n    def run",
            "the returned optimizer (SGD) was created for another model's parameters",
        ),
        (
            "model(batch).mean()",
            "torch.nn.Linear(2, 1)(batch).mean()",
            ".run_forward_step returned a loss that does not depend on the model",
        ),
        (
            "model(batch).mean()",
            "model(batch).mean() * 1j",
            "must return the loss as a floating-point tensor, but it returned a tensor of torch.complex64",
        ),
        (
            '{"mean": 1.0}',
            "'good'",
            "run_compute_metrics must return a dictionary that maps names to numbers, but it returned a str",
        ),
        (
            "Mine(RapidformerEngine()).train()",
            "RapidformerEngine().gather([1])",
            "gather requires a tensor, but got list",
        ),
        (
            "Mine(RapidformerEngine()).train()",
            "RapidformerEngine().build_data_loader(None)",
            "the dataset passed to build_data_loader must have a length and indexable samples "
            "(torch.utils.data.Dataset), but it is a NoneType",
        ),
        (
            "Mine(RapidformerEngine()).train()",
            "RapidformerEngine().compose(model_obj=torch.nn.Linear(2, 1), optimizer_fn=3)",
            "the optimizer must be returned as a function that creates it, or as None, but got a int",
        ),
    ],
)
def test_scripts_that_cannot_be(written: str, instead: str, expected: str, tmp_path: Path, capsys) -> None:
    script, whole = tmp_path / "mine.py", SCRIPT + END
    assert written in whole
    script.write_text(whole.replace(written, instead, 1))
    assert cli.main(["train", "--user-script", str(script), "--epochs", "1"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert expected in said


TOKENS = """
import torch
from rapidformer import Finetuner, RapidformerEngine

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(10, 2)
    def get_input_embeddings(self):
        return self.words
    def forward(self, input_ids):
        return self.words(input_ids)

class Mine(Finetuner):
    def train_valid_test_datasets_provider(self):
        known, strange = [{"input_ids": torch.tensor([1, 9])}] * 8, [{"input_ids": torch.tensor([10, 1])}]
        return known + strange * 8, known, known, None
    def model_optimizer_lr_scheduler_provider(self):
        return Model(), None, None
    def run_forward_step(self, batch, model):
        return model(**batch).mean()
    def run_compute_metrics(self, model, eval_dataloader):
        return {"mean": float(sum(model[0](**batch).mean() for batch in eval_dataloader))}
"""
WHAT_IT_KNOWS = "    def get_input_embeddings(self):\n        return self.words\n"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            "a batch contains the token id 10, but the model has 10 tokens, so ids must be from 0 to 9",
        ),
        (
            {"known + strange * 8, known,": "known, strange,"},
            "a batch contains the token id 10, but the model has 10 tokens, so ids must be from 0 to 9",
        ),
        (
            {"known + strange * 8, known, known": "known, known, datasets.Dataset.from_list(strange)"},
            "the test data contains the token id 10, but the model has 10 tokens, so ids must be from 0 to 9",
        ),
        (
            {WHAT_IT_KNOWS: ""},
            "with IndexError: an embedding with 10 rows was indexed with 10 (mine.py, line 10, in forward)",
        ),
        (
            {"[10, 1]": "[-1, 9]"},
            "with IndexError: an embedding with 10 rows was indexed with -1 (mine",
        ),
    ],
)
def test_a_vocabulary_that_is_larger_than_the_model_s(
    changes: dict[str, str], expected: str, tmp_path: Path, capsys
) -> None:
    script, whole = tmp_path / "mine.py", TOKENS + END
    for written, instead in changes.items():
        assert written in whole
        whole = whole.replace(written, instead)
    script.write_text(whole.replace("import torch\n", "import datasets, torch\n", 1))
    assert cli.main(["train", "--user-script", str(script), "--epochs", "1"]) == 2
    out, err = capsys.readouterr()
    (said,) = err.splitlines()
    assert expected in said
    assert "the test data" not in said or "iteration" not in out


def test_an_optimizer_of_some_weights_steps_these_alone() -> None:
    head, body = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    before = {"head": head, "body": body}
    now = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("head", "body", "adapter")}
    optimizer = prepare.optimizer_of(torch.optim.SGD([head], lr=1.0), before, now)
    (group,) = optimizer.param_groups
    assert [id(one) for one in group["params"]] == [id(now["head"]), id(now["adapter"])]


def test_a_script_as_it_should_be(tmp_path: Path, capsys) -> None:
    script, board = tmp_path / "mine.py", tmp_path / "board"
    script.write_text(SCRIPT + END)
    flags = ["--user-script", str(script), "--epochs", "2", "--save", str(tmp_path)]
    assert cli.main(["train", *flags, "--tensorboard-dir", str(board)]) == 0
    out = capsys.readouterr().out
    assert "mean: 1.0000" in out
    metrics = tmp_path / "metrics.jsonl"
    rows = tiny.rows(metrics, "start")
    assert (rows[0]["train_iters"], rows[0]["world_size"], rows[0]["global_batch_size"]) == (2, 1, 8)
    shown = json.loads(snapshot.Run(metrics, "mine").snapshot()[1])
    assert shown["ended_by"] == "iterations"
    assert shown["curves"]["loss"]["x"] == [1, 2]
    assert shown["curves"]["validation"]["x"] == [1, 2]
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert list(board.glob("events.out.tfevents.*"))


@pytest.mark.parametrize(("epochs", "iterations", "end"), [(1, 5, 1), (3, 2, 2)])
def test_what_comes_first_ends_the_training(
    epochs: int, iterations: int, end: int, tmp_path: Path, capsys
) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT + END)
    flags = ["--user-script", str(tmp_path / "mine.py"), "--epochs", str(epochs)]
    assert cli.main(["train", *flags, "--train-iters", str(iterations), "--lr-decay-style", "linear"]) == 0
    rows = re.findall(r"iteration +(\d+)/ +(\d+).*?learning rate: ([\d.E+-]+)", capsys.readouterr().out)
    assert [(int(number), int(of)) for number, of, _ in rows] == [(at + 1, end) for at in range(end)]
    assert float(rows[-1][2]) == 0  # of the step that would come next


def test_a_terminal_has_a_progress_bar(tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT + END)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert cli.main(["train", "--user-script", str(tmp_path / "mine.py"), "--epochs", "3"]) == 0
    out, error = capsys.readouterr()
    assert "3/3" in error
    assert "iteration        3/       3" in out
    assert "iteration" not in error


def test_what_the_file_system_refuses_is_said_in_one_line(tmp_path: Path, capsys, monkeypatch) -> None:
    script, log = tmp_path / "mine.py", "/dev/full"  # a disk without room
    monkeypatch.setattr(given_files, "is_device", lambda path: False)  # the parser would reject /dev/full
    script.write_text(SCRIPT + END)
    assert cli.main(["train", "--user-script", str(script), "--epochs", "1", "--json-log", log]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("megatron-npu train: error: [Errno 28] No space left")


def test_a_finetuner_is_not_cut() -> None:
    args = parsed(f"--user-script {SLOW} --epochs 1 --tensor-model-parallel-size 2")
    with pytest.raises(UsageError, match="with Finetuner, a Finetuner"):
        templates.Finetuner(SimpleNamespace(args=args)).train()


def test_epochs_of_a_model_that_is_cut_are_refused() -> None:
    args = parsed(f"--user-script {SLOW} --epochs 1 --train-iters 3 --tensor-model-parallel-size 2")
    with pytest.raises(UsageError, match="1 cannot be used with a model-parallel model"):
        templates.PreTrainer(SimpleNamespace(args=args))._samples()


def test_a_rank_whose_others_are_gone_says_so_in_a_line(monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer\nGLHF!")

    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    with pytest.raises(
        UsageError, match="rank 1 cannot connect to the other ranks: Connection closed by peer"
    ):
        engine.join(rank=1, world_size=2, timeout_minutes=1)


def test_a_mistake_on_several_ranks_is_told_once(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT + END.replace("train", "trian"))
    done = train_runs.train("--user-script", script, "--epochs", 1, processes=2)
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert "AttributeError: 'Mine' object has no attribute 'trian'" in said


def test_ctrl_c_ends_all_ranks_says_what_is_saved_and_leaves_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_npu", "train", "--user-script", str(SLOW), "--nproc-per-node"]
    flags = "2 --train-iters 5000 --micro-batch-size 4 --log-interval 1 --save-interval 2 --save".split()
    (tmp_path / "temporary").mkdir()
    environment = {**tiny.environment(), "TMPDIR": str(tmp_path / "temporary")}
    command = [*command, *flags, str(tmp_path / "save")]
    command, env = warm.ready(command, env=environment, modules=train_runs.MODULES)
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(LONGEST, process.kill)
    watchdog.start()
    assert process.stdout is not None
    try:
        next(line for line in process.stdout if "saved" in line)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=LONGEST)
    finally:
        watchdog.cancel()
    assert process.returncode == 130
    # the level of torch's C++ log is read when torch is loaded, which the warm parent has done
    (said,) = [line for line in error.splitlines() if "reducer.cpp" not in line]
    assert "megatron-npu train: interrupted; the last checkpoint in" in said
    assert not [*(tmp_path / "temporary").iterdir()]


def test_two_machines_meet_where_the_variables_say(tmp_path: Path) -> None:
    place = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = ("--user-script", SLOW, "--train-iters", 2, "--micro-batch-size", 4, "--save", tmp_path)
    outcomes: dict[int, subprocess.CompletedProcess[str]] = {}

    def machine(number: int) -> None:
        outcomes[number] = train_runs.train(*flags, NODE_RANK=str(number), **place)

    machines = [threading.Thread(target=machine, args=(number,)) for number in (0, 1)]
    for thread in machines:
        thread.start()
    for thread in machines:
        thread.join()
    assert [outcomes[number].returncode for number in (0, 1)] == [0, 0], outcomes[0].stderr
    assert tiny.rows(tmp_path / "metrics.jsonl", "start")[0]["world_size"] == 2
    assert "iteration        2/       2" in outcomes[0].stdout
    assert "iteration" not in outcomes[1].stdout


def test_an_address_that_is_missing_is_named(capsys, monkeypatch) -> None:
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert cli.main(["train", "--user-script", str(SLOW), "--train-iters", "1"]) == 2
    assert (
        "NNODES=2 requires MASTER_ADDR and MASTER_PORT, as well as NODE_RANK on each machine"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"NNODES": "0"}, "NNODES must be a positive integer, but got 0"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK must be an integer from 0 to 1, but got 2"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT must be an integer from 0 to 65535, but got 99999"),
    ],
)
def test_a_place_that_cannot_be_is_named(changes, expected, capsys, monkeypatch) -> None:
    for name, value in {"MASTER_ADDR": "localhost", **changes}.items():
        monkeypatch.setenv(name, value)
    flags = ["--user-script", str(SLOW), "--train-iters", "1", "--nproc-per-node", "2"]
    assert cli.main(["train", *flags]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert expected in said
