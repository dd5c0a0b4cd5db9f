"""A task is one file: docs/contributing/adding-a-task.md, done; and what is made of what others declare."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import transformers
from transformers.pipelines import PIPELINE_REGISTRY, SUPPORTED_TASKS

from megatron_npu.commands import cli
from megatron_npu.finetune import tasks
from megatron_npu.finetune.run import model_card
from megatron_npu.finetune.tasks.declaration import Flag
from tests.conftest import ROOT
from tests.finetune import tasks_data
from tests.support import processes, tiny_models

PAGE = (ROOT / "docs" / "contributing" / "adding-a-task.md").read_text(encoding="utf-8")
TRAINABLE = [name for name, task in tasks.every().items() if task.head is not None]
# what version 5 of Transformers has left out, and 4 had
REMOVED = {"question-answering", "text2text-generation"}


@pytest.fixture
def next_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The task of the page, as a file beside the others."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "next_sentence.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path / "tasks")])
    tasks.every.cache_clear()
    yield "next_sentence"
    tasks.every.cache_clear()
    sys.modules.pop(f"{tasks.__name__}.next_sentence", None)
    vars(tasks).pop("next_sentence", None)


@pytest.fixture
def argv(tmp_path: Path, next_sentence: str) -> list[str]:
    """The command line behind ``train`` that trains it: a text about the moon does not follow."""
    draw = random.Random(3)
    for part, size in (("train", 48), ("validation", 13)):
        rows = [
            {"sentence1": "the sea", "sentence2": f"the {('sun', 'moon')[label]}", "label": label}
            for label in draw.choices((0, 1), k=size)
        ]
        tasks_data.write_rows(tmp_path / "data" / f"{part}.jsonl", rows)
    tiny_models.bert(tmp_path / "model")
    return [
        *("--task", next_sentence, "--data-path", str(tmp_path / "data")),
        *("--pretrained-model-name-or-path", str(tmp_path / "model"), "--save", str(tmp_path / "out")),
        *("--micro-batch-size", "8", "--lr", "5e-3", "--epochs", "6", "--log-interval", "1"),
    ]


def test_the_worked_task_trains(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *argv]) == 0
    accuracy = float(re.findall(r"accuracy[: ]+([\d.]+)", capsys.readouterr().out)[-1])
    assert accuracy > 0.9  # of 13 pairs; by guessing, half
    card = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
    assert "AutoModelForNextSentencePrediction.from_pretrained" in card


def test_its_flags_are_read_and_refused_to_others(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, swapped = tasks_data.train([*argv, "--swap-texts", "--epochs", "1"])
    _, as_they_are = tasks_data.train([*argv, "--epochs", "1"])
    assert swapped.losses != as_they_are.losses
    other = ["causal_lm" if word == "next_sentence" else word for word in argv]
    assert cli.main(["train", *other, "--swap-texts"]) == 2
    assert "--swap-texts is not used by --task causal_lm; it applies only to" in capsys.readouterr().err


def test_a_model_without_its_head_is_told_what_it_has_one_for(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt2 = tiny_models.gpt2(tmp_path / "gpt2")
    assert cli.main(["train", *argv, "--pretrained-model-name-or-path", str(gpt2)]) == 2
    assert "--task next_sentence does not support " in (said := capsys.readouterr().err)
    assert (
        "the tasks for which Transformers has a head for this model are: causal_lm, question_answering"
        in said
    )


def test_two_tasks_of_one_name_are_an_error(next_sentence: str, tmp_path: Path) -> None:
    (tmp_path / "tasks" / "other.py").write_text(
        "from megatron_npu.finetune.tasks.task import Task\nclass Other(Task):\n    name = 'causal_lm'\n"
    )
    with pytest.raises(ValueError, match="two task classes have the name causal_lm"):
        tasks.every()
    sys.modules.pop(f"{tasks.__name__}.other", None)
    vars(tasks).pop("other", None)


# -- of those that are there


def test_declarations_are_found_without_transformers() -> None:
    code = (
        "import sys\n"
        "from megatron_npu.finetune.run import arguments\n"
        "arguments.parser()\n"
        "print([name for name in ('transformers', 'datasets', 'accelerate') if name in sys.modules])"
    )
    done = processes.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_page_of_tasks_has_a_row_for_each() -> None:
    page = (ROOT / "docs" / "how-to" / "train-tasks.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `(AutoModel\w+)` \|", page, re.M))
    assert rows == {name: tasks.every()[name].head for name in TRAINABLE}


@pytest.mark.parametrize("name", TRAINABLE)
def test_heads_and_pipelines_are_transformers_own(name: str) -> None:
    task = tasks.every()[name]
    assert task.head is not None
    auto = getattr(transformers, task.head)
    named = model_card._pipeline(task)
    if named is None:
        assert task.pipeline in REMOVED
        assert task.pipeline not in PIPELINE_REGISTRY.get_supported_tasks()
    else:
        assert auto in SUPPORTED_TASKS[named]["pt"]  # the pipeline loads the head that was trained


@pytest.mark.parametrize("name", TRAINABLE)
def test_what_the_card_says_of_its_use_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tasks.every()[name]
    assert task.head is not None
    lines = model_card._use(task.head, model_card._pipeline(task))
    tasks_data.TASKS[name][1](tmp_path / "model")
    monkeypatch.chdir(tmp_path / "model")
    made: dict[str, Any] = {}
    exec("\n".join(lines), made)
    model = made["run"].model if "run" in made else made["model"]
    assert type(model) in getattr(transformers, task.head)._model_mapping.values()


def test_every_flag_has_its_readers() -> None:
    for name, task in tasks.every().items():
        assert all(isinstance(flag, Flag) for flag in task.flags), name
    masked = tasks.every()["masked_lm"].all_reads()
    assert masked == set("mask_prob append_eod columns data_name validation_fraction skip_bad_rows".split())
    assert not tasks.every()["pretraining"].all_reads() & {"columns", "append_eod"}
