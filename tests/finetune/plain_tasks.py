"""The same tasks in plain Transformers: what becomes of rows, written here anew, and a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

from megatron_npu.finetune.data import loading

Batch = dict[str, torch.Tensor]


def classes(rows: list[dict[str, Any]], tokenizer: Any) -> Batch:
    names = ["moon", "sun"]
    batch = tokenizer([row["sentence"] for row in rows], padding=True, return_tensors="pt")
    return {**batch, "labels": torch.tensor([names.index(row["label"]) for row in rows])}


def tags(rows: list[dict[str, Any]], tokenizer: Any) -> Batch:
    names, all_ids, all_labels = ["B-LOC", "B-PER", "O"], [], []
    for row in rows:
        ids, labels = [tokenizer.cls_token_id], [-100]
        for word, tag in zip(row["tokens"], row["ner_tags"], strict=True):
            own = tokenizer(word, add_special_tokens=False)["input_ids"]
            ids += own
            labels += [names.index(tag), *[-100] * (len(own) - 1)]
        all_ids.append([*ids, tokenizer.sep_token_id])
        all_labels.append([*labels, -100])
    width = max(map(len, all_ids))
    return {
        "input_ids": torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids in all_ids]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in all_ids]),
        "labels": torch.tensor([labels + [-100] * (width - len(labels)) for labels in all_labels]),
    }


def answers(rows: list[dict[str, Any]], tokenizer: Any) -> Batch:
    batch = tokenizer(
        [row["question"] for row in rows], [row["context"] for row in rows], padding=True, return_tensors="pt"
    )
    places = []
    for row in rows:  # every word is a token; before the context come CLS, the question's tokens and SEP
        before = len(row["context"][: row["answers"]["answer_start"][0]].split())
        places.append(2 + len(tokenizer(row["question"], add_special_tokens=False)["input_ids"]) + before)
    return {**batch, "start_positions": torch.tensor(places), "end_positions": torch.tensor(places)}


def pairs(rows: list[dict[str, Any]], tokenizer: Any) -> Batch:
    batch = tokenizer([row["source"] for row in rows], padding=True, return_tensors="pt")
    labels = tokenizer([row["target"] for row in rows], padding=True, return_tensors="pt")
    return {**batch, "labels": labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)}


def blocks(
    rows: list[dict[str, Any]], tokenizer: Any, size: int, *, special: bool
) -> list[dict[str, list[int]]]:
    together = [token for row in rows for token in tokenizer(row["text"])["input_ids"]]
    found = [together[first : first + size] for first in range(0, len(together) // size * size, size)]
    mask = tokenizer.get_special_tokens_mask
    return [
        {"input_ids": own}
        | ({"special_tokens_mask": mask(own, already_has_special_tokens=True)} if special else {})
        for own in found
    ]


def masked(samples: list[Any], tokenizer: Any) -> Batch:
    """Mask each sample with the draws that are its own, until it asks for something."""
    collate, rows = DataCollatorForLanguageModeling(tokenizer), []
    for sample, seed in zip(samples, loading.sample_seeds(len(samples)), strict=True):
        torch.manual_seed(seed)
        row = collate([dict(sample)])
        while (row["labels"] == -100).all():
            row = collate([dict(sample)])
        rows.append(row)
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def of(
    task: str, rows: list[dict[str, Any]], tokenizer: Any
) -> tuple[list[Any], Callable[[list[Any]], Batch | list[Batch]]]:
    """Return the samples of a task's rows, and what makes a batch of some."""
    if task == "causal_lm":
        samples = blocks(rows, tokenizer, 16, special=False)
        return samples, lambda some: {
            name: torch.tensor([one["input_ids"] for one in some]) for name in ("input_ids", "labels")
        }
    if task == "masked_lm":
        return blocks(rows, tokenizer, 32, special=True), functools.partial(masked, tokenizer=tokenizer)
    if task == "question_answering":  # whose models look for the answer in what fills up a batch, too
        return rows, lambda some: [answers([row], tokenizer) for row in some]
    make = {
        "sequence_classification": classes,
        "token_classification": tags,
        "seq2seq": pairs,
    }[task]
    return rows, lambda some: make(some, tokenizer)


_CLASSES = {
    "sequence_classification": ("AutoModelForSequenceClassification", {"num_labels": 2}),
    "token_classification": ("AutoModelForTokenClassification", {"num_labels": 3}),
    "question_answering": ("AutoModelForQuestionAnswering", {}),
    "causal_lm": ("AutoModelForCausalLM", {}),
    "masked_lm": ("AutoModelForMaskedLM", {}),
    "seq2seq": ("AutoModelForSeq2SeqLM", {}),
}


def losses(
    task: str,
    folder: Path,
    rows: list[dict[str, Any]],
    batches: Callable[[list[Any], Any], Any],
    *,
    seed: int,
    most: int | None = None,
) -> list[float]:
    """Return the loss of each iteration, whose batch is taken whole.

    Args:
        task: as ``--task`` has it.
        folder: of the model.
        rows: to train on.
        batches: gives the global batches of samples, by a function that makes one.
        seed: of a head that is not stored.
        most: iterations; None: those of an epoch.
    """
    name, options = _CLASSES[task]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    samples, collate = of(task, rows, tokenizer)
    every = list(batches(samples, collate))
    torch.manual_seed(seed)
    model = getattr(transformers, name).from_pretrained(folder, **options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    iterations = most or len(every)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, iterations)
    found = []
    for batch in every[:iterations]:
        if isinstance(batch, list):  # of as many samples each, with one label a sample
            loss = sum(model(**own).loss for own in batch) / len(batch)
        else:
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found
