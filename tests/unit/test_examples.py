"""examples/ddp_from_scratch: its model, data set and text, without training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT

FOLDER = str(ROOT / "examples" / "ddp_from_scratch")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch):
    """The two modules beside the program, which finds them in its own folder."""
    monkeypatch.syspath_prepend(FOLDER)
    import gpt
    import text_data

    yield gpt, text_data
    for name in ("gpt", "text_data"):
        del sys.modules[name]


def model(gpt, **changes: object):
    sizes = {"embedding_dim": 8, "num_layers": 1, "num_heads": 2, "context_len": 4, "vocabulary_size": 257}
    return gpt.GPTModel(**sizes | {"dropout": 0.1, "qkv_bias": False} | changes)


def test_gpt2_small_without_bias_of_queries_keys_and_values(modules) -> None:
    gpt, _ = modules
    sizes = {"embedding_dim": 768, "num_layers": 12, "num_heads": 12, "context_len": 1024}
    with torch.device("meta"):
        small = model(gpt, **sizes, vocabulary_size=50257)
        biased = model(gpt, **sizes, vocabulary_size=50257, qkv_bias=True)
    layer = 2 * 2 * 768 + 3 * 768**2 + 768**2 + 768 + 2 * 4 * 768**2 + 5 * 768
    expected = 2 * 50257 * 768 + 1024 * 768 + 12 * layer + 2 * 768
    assert sum(parameter.numel() for parameter in small.parameters()) == expected == 163_009_536
    assert sum(parameter.numel() for parameter in biased.parameters()) == expected + 12 * 3 * 768


def test_dropout_and_the_causal_mask(modules) -> None:
    gpt, _ = modules
    torch.manual_seed(0)
    tried = model(gpt, dropout=0.5)
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert not torch.equal(tried(tokens), tried(tokens))
    tried.eval()
    assert torch.equal(tried(tokens), tried(tokens))
    assert torch.allclose(tried(tokens)[:, :3], tried(torch.tensor([[1, 2, 3, 9]]))[:, :3])


def test_windows_over_the_files_of_a_folder(modules, tmp_path: Path) -> None:
    _, text_data = modules
    (tmp_path / "a.txt").write_text("abcd")
    (tmp_path / "b.txt").write_text("efg")
    data = text_data.LLMDataset(str(tmp_path), "bytes", 256, 3, 2)
    text = [*b"abcd", 256, *b"efg", 256]
    assert [
        (inputs.tolist(), targets.tolist()) for inputs, targets in (data[i] for i in range(len(data)))
    ] == [(text[at : at + 3], text[at + 1 : at + 4]) for at in (0, 2, 4)]
    with pytest.raises(SystemExit, match=r"9 tokens in \.txt files; more than 9 are needed"):
        text_data.LLMDataset(str(tmp_path), "bytes", 256, 9, 9)


@pytest.mark.parametrize("top_k", [1, 3])
def test_a_prompt_in_chinese_longer_than_the_context(modules, top_k: int) -> None:
    gpt, text_data = modules
    tokenizer = text_data.tokenizer_for("bytes")
    text = gpt.generate_text(model(gpt), "萧炎,斗之力,三段", 5, tokenizer, 4, top_k)
    assert text.startswith("萧炎,斗之力,三段")
    assert len(text) > len("萧炎,斗之力,三段")
