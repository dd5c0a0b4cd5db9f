"""What a trained model becomes for users of transformers: text, a card, and an old form of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_npu.commands import cli
from megatron_npu.generation.generate import generate
from tests.support import stock_lm, tiny

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A GPT that has learned to count letters."""
    folder = tmp_path_factory.mktemp("trained")
    stock_lm.write_vocabulary(folder)
    stock_lm.write_dataset(folder / "letters")
    line = (
        f"{' '.join(tiny.flags_for(folder / 'letters'))} --tokenizer-type GPT2BPETokenizer --no-plot "
        f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt --save {folder}/run "
        "--train-iters 60 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0"
    ).replace(f"--vocab-size {tiny.SIZE}", "")
    done = tiny.run("pretrain", *line.split())
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_pipeline_writes_the_same_text(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    line = "convert --from megatron --to hf --hf-weights pytorch_model.bin".split()
    assert cli.main([*line, str(trained), str(tmp_path / "hf")]) == 0
    assert "logits of both models" in capsys.readouterr().out
    assert torch.load(tmp_path / "hf" / "pytorch_model.bin", weights_only=True)
    assert not list((tmp_path / "hf").glob("*.safetensors"))
    asked = transformers.pipeline("text-generation", str(tmp_path / "hf"))
    (answer,) = asked("abcdef", max_new_tokens=8, do_sample=False)
    assert answer["generated_text"] == generate(str(trained), "abcdef", num_tokens=8, temperature=0)
    assert answer["generated_text"].startswith("abcdef")
    assert len(answer["generated_text"]) == 14


def test_the_card_says_what_it_is_and_how_it_was_trained(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    line = "convert --from megatron --to hf --proof tensors --max-shard-gb 1e-5".split()
    assert cli.main([*line, "--hf-weights", "pytorch_model.bin", str(trained), str(tmp_path / "hf")]) == 0
    assert len(list((tmp_path / "hf").glob("pytorch_model-*.bin"))) > 1
    card = (tmp_path / "hf" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n")
    assert "# GPT2LMHeadModel from Megatron" in card
    assert "Trained with Megatron for 60 iterations. The weights are fp32." in card
    assert "| `--hidden-size` | 32 |" in card
    assert "| `--lr` | 0.01 |" in card
    assert "- data: `letters`" in card
    assert "- samples: 480 of 32 tokens" in card
    assert "- validation loss: " in card
    assert 'pipeline("text-generation", ".")' in card
    assert str(tmp_path.parent.parent) not in card, "no folder of this machine"
    for way, source, target in (("hf megatron", "hf", "m"), ("megatron hf", "m", "again")):
        origin, result = way.split()
        line = (
            f"convert --from {origin} --to {result} --proof tensors {tmp_path / source} {tmp_path / target}"
        )
        assert cli.main(line.split()) == 0
    assert "without further training in Megatron" in (tmp_path / "again" / "README.md").read_text()
