"""Names of a hub: a model and a data set are fetched, and the trained model is pushed and fetched again."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import foreign_stores, hub, tiny, tiny_models, train_runs, warm

pytest.importorskip("transformers")
pytest.importorskip("datasets")

PUSH = """
import sys
from transformers import AutoModelForSequenceClassification, AutoTokenizer
for kind in (AutoModelForSequenceClassification, AutoTokenizer):
    kind.from_pretrained(sys.argv[1]).push_to_hub("me/mine")
again = AutoModelForSequenceClassification.from_pretrained("me/mine")
print(type(again).__name__, AutoTokenizer.from_pretrained("me/mine").decode([2]))
"""


def test_names_of_a_hub_are_trained_on_and_the_model_goes_back(tmp_path: Path) -> None:
    """As documents type them: ``--data-path acme/pairs --data-name mrpc``, ``push_to_hub``."""
    tiny_models.bert(tmp_path / "models" / "acme" / "bert")
    train_runs.glue(tmp_path / "datasets" / "acme" / "pairs", train=16, validation=8)
    with hub.Hub(tmp_path).running() as place:
        own = {"HF_ENDPOINT": place.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        own |= {"HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment = {**tiny.environment(), **own}
        command = [
            *(sys.executable, "-m", "megatron_npu", "train", "--task", "sequence_classification"),
            *("--pretrained-model-name-or-path", "acme/bert", "--data-path", "acme/pairs"),
            *("--data-name", "mrpc", "--epochs", "1", "--micro-batch-size", "4"),
            *("--global-batch-size", "8", "--lr", "1e-3", "--save", str(tmp_path / "saved"), "--no-plot"),
        ]
        done = warm.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        assert len(train_runs.losses(tmp_path / "saved")) == 2
        for fetched in (
            r"GET /acme/bert/resolve/.*/model.safetensors",
            r"GET /datasets/acme/pairs/resolve/.*/train.*",
        ):
            assert any(re.fullmatch(fetched, asked) for asked in place.asked), place.asked
        command = [sys.executable, "-c", PUSH, str(tmp_path / "saved" / "model")]
        done = warm.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "BertForSequenceClassification [CLS]" in done.stdout
    pushed = {path.name for path in (tmp_path / "models" / "me" / "mine").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= pushed


SILENT = "does not answer"


def test_a_hub_that_says_nothing_is_asked_once(tmp_path: Path) -> None:
    """Its client would ask for each file, for over a minute, until the watchdog ends the run."""
    text = tmp_path / "sentences.csv"
    text.write_text("text,label\na,0\nb,1\n" * 4)
    lines = tmp_path / "made"
    train = ["train", "--task", "sequence_classification", "--pretrained-model-name-or-path", "no/model"]
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "255", "--output-prefix", str(lines)]
    with foreign_stores.serving(lambda connection: None) as port:
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "home")}
        own |= {"HF_HUB_OFFLINE": "0", "HF_HUB_ETAG_TIMEOUT": "1"}
        for words, told in (
            ([*train, "--data-path", str(text), "--epochs", "1"], "the hub cannot be reached"),
            (["preprocess", *null, "--hf-dataset", "no/data"], "cannot be read: Couldn't reach"),
        ):
            command = [sys.executable, "-m", "megatron_npu", *words]
            environment = {**tiny.environment(), **own}
            done = warm.run(command, env=environment, capture_output=True, text=True, timeout=120)
            assert done.returncode == 2, done.stderr
            assert done.stderr.count(SILENT) == 1, done.stderr
            assert told in done.stderr.splitlines()[-1], done.stderr
