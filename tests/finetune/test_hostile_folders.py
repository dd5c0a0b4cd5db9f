"""A stranger's model for ``train``: nothing in its folder runs, what it cannot be is told in one line."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.model import pretrained
from tests.support import tiny_models
from tests.support.payload import Runs

CODE = "import os\nos.mkdir({mark!r})\nfrom transformers import GPT2Config as C, GPT2LMHeadModel as M\n"


def changed(folder: Path, file: str = "config.json", **values: object) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def pickled(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Runs(mark)}, folder / "pytorch_model.bin")


def with_code(folder: Path, mark: Path) -> None:
    (folder / "evil.py").write_text(CODE.format(mark=str(mark)))
    changed(folder, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})


def adapted(folder: Path, mark: Path) -> None:
    config = {
        "peft_type": "LORA",
        "r": 2,
        "target_modules": ["c_attn"],
        "base_model_name_or_path": str(folder),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.save({"weight": Runs(mark)}, folder / "adapter_model.bin")


def outside(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    names = {"weight_map": {"transformer.wte.weight": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(names))


def deep(folder: Path, mark: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def endless(folder: Path, mark: Path) -> None:
    changed(folder, n_layer=10**9)


def immense(folder: Path, mark: Path) -> None:
    changed(folder, n_embd=10**9)


def of_words(folder: Path, mark: Path) -> None:
    changed(folder, n_embd="many")


def cut_off(folder: Path, mark: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def claiming(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.gpt2(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (pickled, " refers to posix.mkdir"),
        (with_code, "contains custom code"),
        (adapted, "adapter_model"),
        (outside, "lists ../other.safetensors, which is not in the folder"),
        (deep, "recursion"),
        (endless, "num_hidden_layers is 1,000,000,000"),
        (immense, "overflow"),
        (of_words, "expected int"),
        (cut_off, "header"),
        (claiming, "header"),
    ],
)
def test_one_line_and_nothing_runs(
    spoil: Callable[[Path, Path], None], told: str, model: Path, tmp_path: Path, monkeypatch
) -> None:
    folder, mark = Path(shutil.copytree(model, tmp_path / "model")), tmp_path / "mark"
    spoil(folder, mark)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))  # Transformers asks whether code may run
    with pytest.raises(UsageError, match=told) as refused:
        pretrained.model(str(folder), "AutoModelForCausalLM", pretrained.config(str(folder)))
    assert "\n" not in str(refused.value)
    assert not mark.exists()


def test_a_tokenizer_of_its_own_code_is_not_run(model: Path, tmp_path: Path, monkeypatch) -> None:
    folder, mark = Path(shutil.copytree(model, tmp_path / "model")), tmp_path / "mark"
    (folder / "evil.py").write_text(CODE.format(mark=str(mark)))
    code = {"AutoTokenizer": ["evil.M", "evil.M"]}
    changed(folder, "tokenizer_config.json", tokenizer_class="Evil", auto_map=code)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    assert len(pretrained.tokenizer(str(folder), pretrained.config(str(folder)))) > 10
    assert not mark.exists()
