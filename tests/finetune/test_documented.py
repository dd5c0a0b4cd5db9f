"""The document's scripts, as printed, on one and on two processes; the losses against plain Transformers."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import transformers
from torch.nn.utils import clip_grad_norm_

from megatron_npu.finetune.run import model_card
from megatron_npu.finetune.run.flag_parts import SaveFlags
from megatron_npu.pretrain.flags.frozen_flags import Flags
from tests.support import tiny, tiny_models, train_runs

BATCH, EPOCHS, RATE, WARMUP = 8, 2, 1e-3, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT without dropout, so that every run draws the same."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return tiny_models.bert(tmp_path_factory.mktemp("bert"), "ForSequenceClassification", **still)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_runs.glue(tmp_path_factory.mktemp("glue"))


def flags(model: Path, data: Path, script: str, micro_batch_size: int) -> list[object]:
    """Return the document's command line, with a batch that ranks can share."""
    return [
        *("--user-script", train_runs.DOCUMENTED / script, "--task", "sequence_classification"),
        *("--pretrained-model-name-or-path", model, "--data-path", data, "--data-name", "mrpc"),
        *("--epochs", EPOCHS, "--micro-batch-size", micro_batch_size, "--global-batch-size", BATCH),
        *("--lr", RATE, "--lr-decay-style", "linear", "--lr-warmup-iters", WARMUP),
        *("--weight-decay", "1e-2", "--clip-grad", "1.0"),
    ]


@pytest.fixture(scope="module", params=[1, 2])
def finetuned(request: Any, model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("save")
    arguments = flags(model, data, "rapidformer_finetune_huggingface_bert_trainer.py", 4)
    if (
        request.param > 1
    ):  # as the document has it; weights are shared out by ranks, so one has nothing to share
        arguments.append("--zero-3-memory-optimization")
    done = train_runs.train(
        *arguments, "--save", save, "--log-interval", 1, processes=request.param, HF_HOME=str(save / "cache")
    )
    assert done.returncode == 0, done.stderr
    return save


def plain(model: Path, rows: Any, batches: list[list[int]], decayed: bool) -> list[float]:
    """Train with torch and Transformers alone, in one process; return the losses."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    bert = transformers.AutoModelForSequenceClassification.from_pretrained(model)
    groups = [
        {"params": [p for p in bert.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in bert.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    total = EPOCHS * len(rows) // BATCH if decayed else 12
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, WARMUP, total)
    losses = []
    for batch in batches:
        chosen = [rows[number] for number in batch]
        encoded = tokenizer(
            [row["sentence1"] for row in chosen], [row["sentence2"] for row in chosen], padding=True,
            return_tensors="pt",
        )  # fmt: skip
        loss = bert(**encoded, labels=torch.tensor([row["label"] for row in chosen])).loss
        loss.backward()
        if decayed:
            clip_grad_norm_(bert.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def order(epoch: int, samples: int, seed: int = 1234) -> list[int]:
    from megatron_npu.finetune.data import loading

    generator = torch.Generator().manual_seed(loading._seed(seed, epoch))
    return torch.randperm(samples, generator=generator).tolist()


def test_the_fine_tuning_is_that_of_plain_transformers(finetuned: Path, model: Path, data: Path) -> None:
    rows = datasets.load_dataset(str(data), "mrpc", split="train", cache_dir=str(finetuned / "cache"))
    numbers = [number for epoch in range(EPOCHS) for number in order(epoch, len(rows))]
    batches = [numbers[at : at + BATCH] for at in range(0, len(numbers), BATCH)]
    expected = plain(model, rows, batches, decayed=True)
    assert train_runs.losses(finetuned) == pytest.approx(expected, rel=1e-5)


def test_it_is_evaluated_after_each_epoch(finetuned: Path) -> None:
    found = train_runs.evaluations(finetuned)
    assert list(found) == [6, 12]
    assert set(found[12]["metrics"]) == {"accuracy", "f1"}
    right = found[12]["metrics"]["accuracy"] * 19  # samples: each counts once, on two ranks too
    assert right == pytest.approx(round(right))


def test_the_test_data_are_evaluated_once_at_the_end(finetuned: Path) -> None:
    (found,) = tiny.rows(finetuned / "metrics.jsonl", "test")
    assert found["iteration"] == 12
    right = found["metrics"]["accuracy"] * 5  # samples, on two ranks too
    assert right == pytest.approx(round(right))


def test_the_folder_at_the_end_is_transformers(finetuned: Path) -> None:
    folder = finetuned / "model"
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    encoded = transformers.AutoTokenizer.from_pretrained(folder)("the cat", return_tensors="pt")
    assert loaded(**encoded).logits.shape == (1, 2)
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "# BertForSequenceClassification" in card  # on two ranks, whose model is of a class FSDP…, too
    assert "accuracy on the validation data" in card
    assert "accuracy on the test data" in card
    assert str(finetuned.parent) not in card
    assert not list(finetuned.glob("*.partial"))


def test_a_card_has_one_line_for_all_fused_operations() -> None:
    lines = ["fused ops: norm a (12): layer_norm", "fused ops: norm b: layer_norm", "fused ops: c stays: d"]
    prepared = SimpleNamespace(ledger=[*lines, "fused ops: loss the model: cross_entropy, for 256", "ZeRO 1"])
    none = dict.fromkeys([*model_card._FLAGS, *(field.name for field in fields(SaveFlags))])
    *_, fused, other = model_card._training(SaveFlags.of(Flags(**none)), prepared)
    assert (fused, other) == ("- fused ops: cross_entropy, layer_norm", "- ZeRO 1")


def test_a_loop_of_one_s_own_shares_the_data_and_averages_gradients(
    model: Path, data: Path, tmp_path: Path
) -> None:
    arguments = flags(model, data, "rapidformer_own_loop.py", 4)
    done = train_runs.train(*arguments, "--train-iters", 12, processes=2, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    parts = {
        rank: [float(loss) for loss in re.findall(rf"step \d+ rank {rank}: (\S+)", done.stdout)]
        for rank in (0, 1)
    }
    rows = datasets.load_dataset(str(data), "mrpc", split="train", cache_dir=str(tmp_path / "cache"))
    batches = [list(range(at, at + BATCH)) for at in range(0, len(rows), BATCH)] * EPOCHS
    expected = plain(model, rows, batches, decayed=False)
    means = [(one + other) / 2 for one, other in zip(parts[0], parts[1], strict=True)]
    assert means == pytest.approx(expected, rel=1e-5)
    (metrics,) = set(re.findall(r"epoch 1: (.*)", done.stdout))
    assert set(ast.literal_eval(metrics)) == {"accuracy", "f1"}
