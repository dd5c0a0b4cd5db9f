"""docs/how-to/train-tasks.md: every command of it, on small models and data of the names that it has."""

from __future__ import annotations

import csv
import json
import random
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("transformers")
library = pytest.importorskip("datasets")

from megatron_npu.commands import cli  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.finetune import tasks_data  # noqa: E402
from tests.support import tiny_models  # noqa: E402

PAGE = (ROOT / "docs" / "how-to" / "train-tasks.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(block)[1:]
    for block in re.findall(r"```bash\n(.*?)```", PAGE.replace("\\\n", " "), re.S)
    for block in [block.replace("megatron-npu train", "rapidformer")]
]
METRICS_OF_STARS = ["accuracy", "f1_macro", "matthews_correlation"]
METRICS = {
    "sequence_classification": ["accuracy", "f1"],
    "token_classification": ["accuracy", "precision", "recall", "f1"],
    "question_answering": ["exact_match", "f1"],
    "causal_lm": ["perplexity"],
    "masked_lm": ["perplexity"],
    "seq2seq": ["exact_match", "rouge_l"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and data that the page names."""
    folder, draw = tmp_path_factory.mktemp("page"), random.Random(5)
    for name in ("bert", "bert-base-cased"):
        tiny_models.bert(folder / name)
    tiny_models.gpt2(folder / "gpt2")
    tiny_models.t5(folder / "t5")
    with open(folder / "reviews.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["review", "stars"])
        writer.writerows((row["sentence"], draw.randint(1, 5)) for row in tasks_data.classes(40, draw))
    tasks_data.write_rows(folder / "people.jsonl", tasks_data.tags(40, draw))
    tasks_data.write_rows(folder / "questions.jsonl", tasks_data.answers(30, draw, most=70))
    tasks_data.write_rows(folder / "pairs.jsonl", tasks_data.pairs(30, draw))
    lines = (row["text"] for row in tasks_data.texts(60, draw))
    (folder / "story.txt").write_text("".join(f"{line}\n" for line in lines))
    _write_glue(folder / "glue", draw)
    return folder


def _write_glue(folder: Path, draw: random.Random) -> None:
    """Write a data set with a configuration mrpc, whose test labels are not given away, as the hub's has."""
    folder.mkdir()
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: mrpc\n  data_dir: mrpc\n---\n")
    label = library.ClassLabel(names=["not_equivalent", "equivalent"])
    for part, size in (("train", 70), ("validation", 20), ("test", 8)):
        texts = [row["sentence"] for row in tasks_data.classes(2 * size, draw)]
        labels = [-1 if part == "test" else draw.randrange(2) for _ in range(size)]
        columns = {"sentence1": texts[:size], "sentence2": texts[size:], "label": labels, "idx": range(size)}
        rows = library.Dataset.from_dict({name: list(values) for name, values in columns.items()})
        (folder / "mrpc").mkdir(exist_ok=True)
        rows.cast_column("label", label).to_parquet(folder / "mrpc" / f"{part}.parquet")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")


def test_every_task_has_a_command() -> None:
    assert {argv[argv.index("--task") + 1] for argv in COMMANDS} == set(METRICS)


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: argv[argv.index("--data-path") + 1])
def test_a_command_of_the_page_trains(
    argv: list[str], place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert cli.main(["train", *argv]) == 0
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith(" evaluation at")]
    found = re.findall(r"(\w+): [\d.E+-]+ \|", said[-1])
    task = argv[argv.index("--task") + 1]
    of_stars = task == "sequence_classification" and "mrpc" not in argv
    assert found == ["loss", *(METRICS_OF_STARS if of_stars else METRICS[task])]


def test_the_page_s_model_of_reviews_gives_stars(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as it is printed, on reviews of 1 to 5 stars: the saved model's classes are these."""
    monkeypatch.chdir(place)
    (argv,) = [own for own in COMMANDS if "reviews.csv" in own]
    assert cli.main(["train", *argv, "--save", "stars"]) == 0
    config = json.loads((place / "stars" / "model" / "config.json").read_text())
    assert config["id2label"] == {str(number): str(number + 1) for number in range(5)}
