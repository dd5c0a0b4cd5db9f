"""Weights of a stranger: compared with the hub's checksums where there are any, looked at where not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import stranger_weights
from megatron_npu.conversion import hf_files
from megatron_npu.finetune.model import pretrained
from tests.support import tiny_models

pytest.importorskip("transformers")


def flip_exponent(file: Path, name: str) -> None:
    """Flip the highest bit of the exponent of a tensor's first value, which is below 2."""
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin = json.loads(content[8 : 8 + length])[name]["data_offsets"][0]
    content[8 + length + begin + 3] ^= 0x40
    file.write_bytes(content)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_models.gpt2(tmp_path / "model")


def read_by_train(folder: Path) -> None:
    pretrained.model(str(folder), "AutoModelForCausalLM", pretrained.config(str(folder)))


def read_by_convert(folder: Path) -> None:
    source = hf_files.Source(folder)
    for name in source.names():
        for _ in range(2):  # it is said once
            source.read(name)


READERS = pytest.mark.parametrize("read", [read_by_train, read_by_convert])
NAME = "transformer.h.0.attn.c_attn.weight"


@READERS
def test_a_flipped_exponent_is_named(model, read, capsys):
    read(model)
    assert "The file may be damaged" not in capsys.readouterr().err
    flip_exponent(model / "model.safetensors", NAME)
    read(model)
    told = capsys.readouterr().err
    assert told.count("The file may be damaged") == 1
    assert f"{NAME} has a value of " in told


@READERS
@pytest.mark.parametrize("kind", ["cache", "download"])
def test_what_the_hub_knows_is_compared(model, read, kind):
    file = model / "model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    stored = file
    if kind == "cache":
        stored = model.parent / "blobs" / digest
        stored.parent.mkdir()
        file.rename(stored)
        file.symlink_to(stored)
    else:
        note = model / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
        note.parent.mkdir(parents=True)
        note.write_text(f"{'0' * 40}\n{digest}\n1764160000.0\n")
    assert stranger_weights.require_as_downloaded(model) == 1
    read(model)
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)
    with pytest.raises(
        UsageError, match=r"model\.safetensors is damaged: its SHA-256 differs from the hub's"
    ):
        read(model)


def test_any_number_that_is_none_or_too_large_is_named(capsys):
    weights = {
        "fine": torch.full((4,), 99_000.0, dtype=torch.bfloat16),
        "nan": torch.tensor([1.0, float("nan")]),
        "infinite": torch.tensor([1.0, -torch.inf], dtype=torch.bfloat16),
        "large": torch.tensor([[-2e5]]),
        "numbers": torch.tensor([1 << 40]),
        "empty": torch.empty(0),
    }
    assert stranger_weights.tell_of_implausible("x", weights.items()) == ["nan", "infinite", "large"]
    assert "x: nan has a value of inf, and 2 more weights have such values" in capsys.readouterr().err
