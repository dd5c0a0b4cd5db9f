"""What inference asks of tokenizers that have no answer of their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.adaptors.megatron_core.data import tokenizers
from megatron_npu.base.errors import UsageError

pytestmark = pytest.mark.usefixtures("single_process")

# U+FFFD stands for a character that is not complete yet
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\N{REPLACEMENT CHARACTER}"))


@pytest.fixture(scope="module")
def byte_tokenizer(single_process):
    """A tokenizer with a token for each byte of UTF-8, as GPT-2's has for rare characters."""
    from megatron.core.datasets import megatron_tokenizer

    class Bytes(
        getattr(megatron_tokenizer, "MegatronLegacyTokenizer", None) or megatron_tokenizer.MegatronTokenizer
    ):
        vocab = inv_vocab = vocab_size = None

        def tokenize(self, text: str) -> np.ndarray:
            return list(text.encode())

        def detokenize(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    return Bytes("bytes")


@settings(max_examples=30)
@given(text=TEXTS)
def test_a_text_is_cut_where_its_tokens_begin(byte_tokenizer, text: str) -> None:
    starts = [place for place, character in enumerate(text) for _ in character.encode()]
    assert byte_tokenizer.offsets(byte_tokenizer.tokenize(text), text) == starts


def test_no_token_begins_a_text(byte_tokenizer) -> None:
    assert byte_tokenizer.bos is None


def test_without_a_network_the_flag_is_named_that_needs_none(monkeypatch, tmp_path) -> None:
    pytest.importorskip("transformers")
    library = pytest.importorskip(
        "megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer", reason="needs a Megatron since 0.15"
    )
    from megatron.core.tokenizers.text.libraries import huggingface_tokenizer

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no network\nand more lines")

    monkeypatch.setattr(huggingface_tokenizer.AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(
        UsageError, match=r"GPT2BPETokenizer cannot be loaded: .*no network[.] .* Add --legacy-tokenizer"
    ):
        library.MegatronHFTokenizer("GPT2BPETokenizer", str(tmp_path / "vocab"), str(tmp_path / "merges"))


def test_without_transformers_the_package_is_named(monkeypatch, tmp_path) -> None:
    library = pytest.importorskip(
        "megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer", reason="needs a Megatron since 0.15"
    )
    monkeypatch.setattr(tokenizers, "installed", lambda *_: None)
    with pytest.raises(
        UsageError,
        match=r"requires the package transformers, which is not installed[.] .* pip install transformers",
    ):
        library.MegatronHFTokenizer("GPT2BPETokenizer", str(tmp_path / "vocab"), str(tmp_path / "merges"))
    with pytest.raises(
        UsageError, match="the tokenizer somewhere requires the package transformers, which is not installed"
    ):
        library.HuggingFaceTokenizer("somewhere")


def test_files_are_read_without_a_hub(gpt2_vocab, tmp_path, monkeypatch) -> None:
    """What stands in for --legacy-tokenizer since 0.17."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("megatron.core")
    from megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer import MegatronHFTokenizer

    def ask_the_hub(self, *_, **__):
        raise OSError("no network")

    def read(kind: str, **given: str) -> MegatronHFTokenizer:
        tokenizer = MegatronHFTokenizer.__new__(MegatronHFTokenizer)
        tokenizers.read_the_files(ask_the_hub, tokenizer, kind, **given)
        return tokenizer

    files = {"vocab_file": str(gpt2_vocab.vocab_file), "merges_file": str(gpt2_vocab.merge_file)}
    text = "To be, naïve 北京<|endoftext|>"
    expected = transformers.GPT2TokenizerFast(*files.values())(text).input_ids
    tokenizer = read("GPT2BPETokenizer", **files)
    assert tokenizer.tokenizer(text).input_ids == expected
    assert tokenizer.eos_id == 50256
    (tmp_path / "bert.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nHello\n")
    for kind, token in (("BertWordPieceLowerCase", 5), ("BertWordPieceCase", 6)):
        found = read(kind, vocab_file=str(tmp_path / "bert.txt")).tokenizer("Hello")
        assert found.input_ids == [2, token, 3]
    with pytest.raises(UsageError, match=r"GPT2BPETokenizer cannot be loaded: no network.*Pass --vocab-file"):
        read("GPT2BPETokenizer")
    with pytest.raises(
        UsageError, match=r"--merge-file .*absent does not exist, but a tokenizer file is required"
    ):
        read("GPT2BPETokenizer", **files | {"merges_file": str(tmp_path / "absent")})


def test_t5_finds_its_sentinels(tmp_path) -> None:
    """Transformers 5 does not keep a list of them, which 0.15 to 0.17 take from it."""
    pytest.importorskip("transformers")
    library = pytest.importorskip(
        "megatron.core.tokenizers.text.libraries.huggingface_tokenizer", reason="needs a Megatron since 0.15"
    )
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    sentinels = [f"<extra_id_{number}>" for number in range(3)]
    tokenizer = library.HuggingFaceTokenizer(str(tmp_path), additional_special_tokens=sentinels)
    assert tokenizer.additional_special_tokens_ids == [6, 7, 8]
