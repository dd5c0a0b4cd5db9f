"""The loss of a global batch is the mean over its labels, in micro-batches and on ranks as by a plain loop.

The loops are written here, with torch and Transformers alone. Eight rows are an epoch of one global batch, so
that their order does not matter; losses and norms of four iterations are compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")

from megatron_npu.finetune.data import loading  # noqa: E402
from megatron_npu.finetune.run import ranks  # noqa: E402
from tests.finetune import plain_tasks, tasks_data  # noqa: E402
from tests.support import tiny, tiny_models, train_runs  # noqa: E402

WORDS = [word for word in tiny_models.WORDS if word.isalpha()]
LONG, SHORT = 30, 2  # words of a target, by turns
PAIRS = [
    {"source": " ".join(WORDS[n : n + 5]), "target": " ".join(WORDS[(7 * n + k) % 30] for k in range(size))}
    for n, size in enumerate((SHORT, LONG, SHORT, SHORT, LONG, SHORT, SHORT, LONG))
]
TAGS = [  # of one row nothing is asked: it has no words
    {
        "tokens": WORDS[n : n + size],
        "tags": ["O", "B-LOC", "O", "O", "B-LOC", "B-LOC", "O", "O", "B-LOC"][:size],
    }
    for n, size in enumerate((2, 9, 1, 8, 0, 3, 1, 7))
]
CONTEXTS = [  # of 3 to 24 words, and which of them is the answer
    ([WORDS[(n + k) % 30] for k in range(size)], size // 2)
    for n, size in enumerate((3, 24, 5, 9, 17, 3, 21, 4))
]
QUESTIONS = [
    {
        "question": f"where is {words[at]} ?",
        "context": " ".join(words),
        "answers": {"text": [words[at]], "answer_start": [len(" ".join([*words[:at], ""]))]},
    }
    for words, at in CONTEXTS
]
BLOCKS = 16  # of 32 tokens, of which each asks for another number of words
TEXTS = [{"text": " ".join(WORDS[(n * k + k) % 30] for k in range(30))} for n in range(BLOCKS)]
ITERATIONS, LR = 4, 3e-3
FLAGS = ["--global-batch-size", "8", "--epochs", str(ITERATIONS), "--lr", str(LR), "--weight-decay", "0"]
FLAGS += ["--log-interval", "1", "--eval-interval", "99", "--no-plot"]


def loop(model: torch.nn.Module, loss_of: Any, largest: float = 1.0) -> tuple[list[float], list[float]]:
    """Train; return the loss and the norm of each iteration."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 - at / ITERATIONS)
    losses, norms = [], []
    for _ in range(ITERATIONS):
        loss = loss_of(model)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), largest)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def of_pairs(model: Any, folder: Path, rows: int = len(PAIRS)) -> torch.Tensor:
    """Return the mean over the tokens of all targets, each row by itself: nothing is filled up."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    every, count = [], 0
    for row in PAIRS[:rows]:
        source, target = (torch.tensor([tokenizer(row[name])["input_ids"]]) for name in ("source", "target"))
        begins = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], 1)
        logits = model(input_ids=source, decoder_input_ids=begins).logits
        every.append(cross_entropy(logits[0], target[0], reduction="sum"))
        count += target.numel()
    return torch.stack(every).sum() / count


def of_tags(model: Any, folder: Path, rows: int = len(TAGS)) -> torch.Tensor:
    """Return the mean over all words, each row by itself."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    every, names = [], ["B-LOC", "O"]
    for row in TAGS[:rows]:
        ids = [tokenizer.convert_tokens_to_ids(word) for word in row["tokens"]]
        whole = torch.tensor([[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]])
        if ids:
            true = torch.tensor([names.index(tag) for tag in row["tags"]])
            every.append(cross_entropy(model(whole).logits[0, 1:-1], true, reduction="none"))
    return torch.cat(every).mean()


def of_answers(model: Any, folder: Path, rows: int = len(QUESTIONS)) -> torch.Tensor:
    """Return the mean over questions, each by itself: the model's own loss, of which nothing is filled up."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    every = []
    for row, (_, before) in [*zip(QUESTIONS, CONTEXTS, strict=True)][:rows]:
        batch = tokenizer([row["question"]], [row["context"]], return_tensors="pt")
        at = torch.tensor([2 + len(row["question"].split()) + before])  # behind CLS and SEP
        every.append(model(**batch, start_positions=at, end_positions=at).loss)
    return torch.stack(every).mean()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and models; four rows to validate on."""
    folder = tmp_path_factory.mktemp("labels")
    for name, rows in (("pairs", PAIRS), ("tags", TAGS), ("questions", QUESTIONS)):
        tasks_data.write_rows(folder / name / "train.jsonl", rows)
        tasks_data.write_rows(folder / name / "validation.jsonl", rows[:5])
    tiny_models.t5(folder / "t5")
    tiny_models.bert(folder / "bert", "ForTokenClassification", num_labels=2)
    tiny_models.bert(folder / "reader", "ForQuestionAnswering")
    return folder


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Losses and norms of the loops."""
    t5 = transformers.T5ForConditionalGeneration.from_pretrained(place / "t5")
    bert = transformers.BertForTokenClassification.from_pretrained(place / "bert")
    reader = transformers.BertForQuestionAnswering.from_pretrained(place / "reader")
    return {
        "question_answering": loop(reader, lambda model: of_answers(model, place / "reader")),
        "seq2seq": loop(t5, lambda model: of_pairs(model, place / "t5")),
        "token_classification": loop(bert, lambda model: of_tags(model, place / "bert")),
    }


def command(place: Path, task: str, micro_batch: int, *flags: str) -> list[str]:
    """Return the command line of a task behind ``train``."""
    data, model = {
        "seq2seq": ("pairs", "t5"),
        "token_classification": ("tags", "bert"),
        "question_answering": ("questions", "reader"),
    }[task]
    named = ["--task", task, "--data-path", str(place / data)]
    return [
        *(*named, "--pretrained-model-name-or-path", str(place / model)),
        *(*FLAGS, "--micro-batch-size", str(micro_batch), *flags),
    ]


def found(log: Path) -> tuple[list[float], list[float]]:
    """Return losses and norms of a run's log."""
    rows = tiny.rows(log)
    return [one for row in rows for one in row["losses"]], [one for row in rows for one in row["grad_norms"]]


def test_targets_of_2_and_30_words(place: Path, whole: Any, tmp_path: Path) -> None:
    log = ["--json-log", str(tmp_path / "log")]
    done = train_runs.train(*command(place, "seq2seq", 1, *log), processes=2)
    assert done.returncode == 0, done.stderr
    losses, norms = found(tmp_path / "log")
    assert losses == pytest.approx(whole["seq2seq"][0], rel=2e-6)
    assert norms == pytest.approx(whole["seq2seq"][1], rel=1e-5)


@pytest.mark.parametrize("task", ["seq2seq", "token_classification", "question_answering"])
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_one_rank(micro_batch: int, task: str, place: Path, whole: Any) -> None:
    _, outcome = tasks_data.train(command(place, task, micro_batch))
    assert outcome.losses == pytest.approx(whole[task][0], rel=2e-6)
    assert outcome.grad_norms == pytest.approx(whole[task][1], rel=1e-5)


def test_masked_words_in_one_micro_batch_in_sixteen_and_on_two_ranks(place: Path, tmp_path: Path) -> None:
    """The masks are of the samples: the loop, which takes each batch whole, draws the same ones."""
    model = tiny_models.bert(place / "masked")
    for part in ("train", "validation"):
        tasks_data.write_rows(place / "texts" / f"{part}.jsonl", TEXTS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    blocks, masked = plain_tasks.of("masked_lm", TEXTS, tokenizer)
    sampling = loading.Sampling(BLOCKS, ranks.Ranks(), shuffle=True, whole=1, seed=1234)
    loader = loading.Loader(blocks, masked, sampling=sampling, device=torch.device("cpu"))
    batches = [next(loader.batches(epoch)) for epoch in range(ITERATIONS)]
    asked = (batches[0]["labels"] != -100).sum(1)
    assert len(blocks) == BLOCKS
    assert len(set(asked.tolist())) > 4
    waiting = iter(batches)
    expected = loop(
        transformers.BertForMaskedLM.from_pretrained(model), lambda model: model(**next(waiting)).loss
    )
    named = ["--task", "masked_lm", "--data-path", str(place / "texts")]
    named += ["--pretrained-model-name-or-path", str(model), *FLAGS, "--seq-length", "32"]
    named += ["--global-batch-size", str(BLOCKS)]
    for micro_batch in (BLOCKS, 1):
        _, outcome = tasks_data.train([*named, "--micro-batch-size", str(micro_batch)])
        assert outcome.losses == pytest.approx(expected[0], rel=2e-6)
        assert outcome.grad_norms == pytest.approx(expected[1], rel=1e-5)
    log = ["--micro-batch-size", "2", "--json-log", str(tmp_path / "log")]
    done = train_runs.train(*named, *log, processes=2)
    assert done.returncode == 0, done.stderr
    losses, norms = found(tmp_path / "log")
    assert losses == pytest.approx(expected[0], rel=2e-6)
    assert norms == pytest.approx(expected[1], rel=1e-5)


EVALUATED: dict[str, tuple[str, str, Any]] = {
    "seq2seq": ("t5", "T5ForConditionalGeneration", of_pairs),
    "token_classification": ("bert", "BertForTokenClassification", of_tags),
    "question_answering": ("reader", "BertForQuestionAnswering", of_answers),
}


@pytest.mark.parametrize("task", EVALUATED)
def test_the_loss_of_an_evaluation_is_over_all_labels(task: str, place: Path) -> None:
    """Five rows in batches of one and of eight: what fills them up counts in none, no batch counts more."""
    folder, kind, loss_of = EVALUATED[task]
    model = getattr(transformers, kind).from_pretrained(place / folder).eval()
    with torch.no_grad():
        expected = float(loss_of(model, place / folder, 5))
    for micro_batch in (1, 8):
        argv = [*command(place, task, micro_batch), "--lr", "0", "--epochs", "1"]
        _, outcome = tasks_data.train(argv)
        assert [one.loss for one in outcome.evaluations.values()] == [pytest.approx(expected, rel=2e-6)]


SWITCHES: dict[str, list[str]] = {
    "none": [],
    "zero-1": ["--zero-1-memory-optimization"],
    "zero-2": ["--zero-2-memory-optimization"],
    "zero-3": ["--zero-3-memory-optimization"],
    "fsdp": ["--fsdp-memory-optimization"],
    "fused": ["--fused-ops", "--checkpoint-activations"],
    "fp16": ["--mixed-precision", "fp16"],
    "bf16": ["--mixed-precision", "bf16"],
    "lora": ["--lora-rank", "4"],
    "clipped": ["--clip-grad", "0.1"],
}


def test_two_ranks_with_switches(place: Path, whole: Any, tmp_path: Path) -> None:
    """Tags: micro-batches of one row, one of them without a word."""
    commands = {
        name: command(place, "token_classification", 1, *flags, "--json-log", str(tmp_path / name))
        for name, flags in SWITCHES.items()
    }
    for size in (2, 4):
        log = ("--json-log", str(tmp_path / f"pairs-{size}"))
        commands[f"pairs-{size}"] = command(place, "seq2seq", size, *log)
    log = ("--json-log", str(tmp_path / "questions"))
    commands["questions"] = command(place, "question_answering", 2, *log)
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    result = tiny.run_python(
        [
            *(tiny.sys.executable, *tiny.torchrun(2)),
            *("-m", "tests.finetune.tasks_worker", str(tmp_path / "commands.json"), str(tmp_path)),
        ],
        {**tiny.environment(), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
    )
    assert result.returncode == 0, result.stderr
    bert = transformers.BertForTokenClassification.from_pretrained(place / "bert")
    clipped = loop(bert, lambda model: of_tags(model, place / "bert"), largest=0.1)
    lora = found(tmp_path / "lora")
    _, alone = tasks_data.train(command(place, "token_classification", 8, *SWITCHES["lora"]))
    assert lora[0] == pytest.approx(alone.losses, rel=1e-5)
    assert lora[1] == pytest.approx(alone.grad_norms, rel=1e-4)
    for name in commands.keys() - {"lora"}:
        losses, norms = found(tmp_path / name)
        tasks = {"pairs-2": "seq2seq", "pairs-4": "seq2seq", "questions": "question_answering"}
        expected = whole[tasks.get(name, "token_classification")]
        expected = clipped if name == "clipped" else expected
        within = {"fp16": 2e-3, "bf16": 2e-2}.get(name, 1e-5)
        assert losses == pytest.approx(expected[0], rel=within), name
        assert norms == pytest.approx(expected[1], rel=10 * within), name
