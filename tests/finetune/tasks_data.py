"""Tiny data for each task, and a run of a task in this process."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import tiny_models

Rows = list[dict[str, Any]]
_PLAIN = [word for word in tiny_models.WORDS if word.isalpha()]
_PLACES, _PEOPLE = ("Paris", "Rome"), ("Anna", "Karl")


def _words(draw: random.Random, least: int = 3, most: int = 9) -> list[str]:
    return draw.choices(_PLAIN, k=draw.randint(least, most))


def classes(size: int, draw: random.Random) -> Rows:
    """Sentences of different lengths about the sun or the moon."""
    chosen = [draw.choice(("sun", "moon")) for _ in range(size)]
    return [{"sentence": " ".join([*_words(draw), one]), "label": one} for one in chosen]


def tags(size: int, draw: random.Random) -> Rows:
    """Words, some of two tokens ("house,"), with the names of places and people in them."""
    rows = []
    for _ in range(size):
        words = [word + draw.choice(["", "", ","]) for word in _words(draw)]
        kinds = {**dict.fromkeys(_PLACES, "B-LOC"), **dict.fromkeys(_PEOPLE, "B-PER")}
        rows.append({"tokens": words, "ner_tags": [kinds.get(word.rstrip(","), "O") for word in words]})
    return rows


def answers(size: int, draw: random.Random, most: int = 9) -> Rows:
    """Questions after a word of the context, as SQuAD has them."""
    rows = []
    for number in range(size):
        words = _words(draw, 3, most)
        place = draw.randrange(len(words))
        begin = len(" ".join([*words[:place], ""]))
        rows.append(
            {
                "id": str(number),
                "question": f"where is {words[place]} ?",
                "context": " ".join(words),
                "answers": {"text": [words[place]], "answer_start": [begin]},
            }
        )
    return rows


def texts(size: int, draw: random.Random) -> Rows:
    """Texts, one behind the other."""
    return [{"text": " ".join(_words(draw, 10, 20))} for _ in range(size)]


def pairs(size: int, draw: random.Random) -> Rows:
    """Words, and the same words backwards."""
    return [
        {"source": " ".join(words), "target": " ".join(reversed(words))}
        for words in (_words(draw, 2, 6) for _ in range(size))
    ]


# of each task: what makes its rows, what makes its model, and the flags that it needs at this size
TASKS: dict[str, tuple[Callable[[int, random.Random], Rows], Callable[..., Path], list[str]]] = {
    "sequence_classification": (classes, tiny_models.bert, []),
    "token_classification": (tags, tiny_models.bert, []),
    "question_answering": (answers, tiny_models.bert, []),
    "causal_lm": (texts, tiny_models.gpt2, ["--seq-length", "16"]),
    "masked_lm": (texts, tiny_models.bert, ["--seq-length", "32"]),
    "seq2seq": (pairs, tiny_models.t5, ["--predict-with-generate", "--max-target-length", "8"]),
}


def write_rows(file: Path, rows: Rows) -> Path:
    """Write JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def write(folder: Path, task: str) -> list[str]:
    """Write data and model of a task; return the command line behind ``train`` that trains it.

    13 rows to validate on: no batch size and no number of ranks divides them.
    """
    make, model, flags = TASKS[task]
    draw = random.Random(1)
    for part, size in (("train", 36), ("validation", 13)):
        write_rows(folder / task / f"{part}.jsonl", make(size, draw))
    name = folder / f"{task}-model"
    model(name)
    return [
        *("--task", task, "--data-path", str(folder / task), "--pretrained-model-name-or-path", str(name)),
        *("--micro-batch-size", "2", "--global-batch-size", "4", "--weight-decay", "0", "--lr", "3e-3"),
        *("--epochs", "1", "--log-interval", "1", *flags),
    ]


def parsed(argv: list[str]) -> argparse.Namespace:
    """Return the flags of a command line, in their place among the ranks."""
    from megatron_npu.finetune.run import arguments, ranks

    args = arguments.parse(argv)
    args = arguments.with_ranks(args, ranks.of_this_process())
    return args


def train(argv: list[str], *, stay: bool = False) -> tuple[Any, Any]:
    """Train a task in this process; return its template, and how it went.

    Args:
        argv: the command line behind ``train``.
        stay: in the group of ranks: one that is joined after it finds what it left in the store.
    """
    from megatron_npu.finetune.rapidformer import engine, state
    from megatron_npu.finetune.tasks import template_for

    args = parsed(argv)
    state.set_args(args)
    try:
        template = template_for(args.task)(engine.RapidformerEngine(args))
        return template, template.train()
    finally:
        if not stay:
            engine.leave()
        state.set_args(None)
