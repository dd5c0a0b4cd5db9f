"""Checkpoints from Hugging Face to Megatron-LM's own pretrain_gpt.py, and what that saves, back again."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_npu.commands import cli
from megatron_npu.generation.generate import generate
from tests.conftest import checkout
from tests.support import tiny
from tests.support.stock_core import losses, pretrain

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

# so low a rate that what is saved is what was given, but for rounding
RUN = [
    *"--train-iters 1 --eval-iters 0 --split 90,10,0 --micro-batch-size 1 --global-batch-size 2".split(),
    *"--lr 1e-9 --finetune".split(),
]


@pytest.mark.parametrize("version", ["0.12.1", "0.16.1", "0.18.2"])
def test_a_stock_script_goes_on_from_hugging_face_and_back(version, dataset, tmp_path, monkeypatch, capsys):
    """A Qwen3, whose flags are the most; the embedded driver begins with the same loss."""
    tree = checkout("megatron_core", version)
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")

    def ours(*words: object) -> str:
        code = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    source, megatron, saved, back = (tmp_path / name for name in ("source", "megatron", "saved", "back"))
    config = transformers.Qwen3Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=40,
        head_dim=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)
    ours("convert", "--from", "hf", "--to", "megatron", "--proof", "tensors", source, megatron)
    flags = [*shlex.split((megatron / "flags.txt").read_text()), *RUN, "--load", str(megatron)]
    ours("pretrain", *flags, "--data-path", dataset, "--no-plot", "--json-log", tmp_path / "log")
    save = ["--ckpt-format", "torch_dist", "--save", str(saved), "--save-interval", "1"]
    if version == "0.18.2":  # whose NullTokenizer counts the end of document among the --vocab-size tokens
        save += ["--vocab-size", "256"]
    done = pretrain(tree, tmp_path, *flags, *save, data=dataset)
    assert losses(done) == [pytest.approx(tiny.losses(tmp_path / "log")[1], rel=1e-6)]

    printed = ours("convert", "--from", "megatron", "--to", "hf", saved, back)
    assert "logits of both models in fp32" in printed
    assert "Qwen3ForCausalLM; NullTokenizer" in printed
    assert _difference(source, back) < 1e-7
    tokens = generate(str(saved), "1 2 3", num_tokens=4, temperature=0).split()
    assert tokens[:3] == ["1", "2", "3"]
    assert 4 <= len(tokens) <= 7


def _difference(one: Path, other: Path) -> float:
    """Return the largest difference of two tensors of one name in two folders of Hugging Face."""
    before, after = (safetensors.load_file(folder / "model.safetensors") for folder in (one, other))
    assert before.keys() == after.keys()
    return max((after[name] - before[name]).abs().max().item() for name in before)
