"""Build the tokenizer of a run, which is GPT-2's, one from Hugging Face, or a null tokenizer for numeric
data.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path

from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization.hf import HuggingFaceTokenizer
from megatron_npu.data.tokenization.null import NullTokenizer
from megatron_npu.data.tokenization.tokenizer import Tokenizer
from megatron_npu.pretrain.flags.plan_parts import TokenizerFlags


def continuation(tokenizer: Tokenizer, text: str, more: str) -> list[int]:
    """Return the token ids that ``more`` adds to a text when it follows ``text``.

    GPT-2's tokenizers encode ``more`` separately, as Megatron's LAMBADA does. A Hugging Face tokenizer may
    add tokens at the beginning of every text, so it must encode both texts together.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.encode(text + more)[len(tokenizer.encode(text)) :]
    return tokenizer.encode(more)


def model_vocabulary(flags: TokenizerFlags, tokenizer: Tokenizer) -> int:
    """Return the model's vocabulary size, which is the tokenizer's or, if larger, the value of --vocab-size.

    Raises:
        UsageError: ``--vocab-size`` is smaller than the tokenizer's number of tokens.
    """
    if flags.tokenizer_type == "NullTokenizer" or flags.vocab_size is None:
        return tokenizer.vocab_size
    if flags.vocab_size < tokenizer.vocab_size:
        raise UsageError(
            f"--vocab-size must be at least {tokenizer.vocab_size}, the number of tokens of the tokenizer, "
            f"but got {flags.vocab_size}",
            remedy="Remove --vocab-size.",
        )
    return flags.vocab_size


def build(flags: TokenizerFlags) -> Tokenizer:
    """Return the tokenizer that ``--tokenizer-type`` and the tokenizer files specify.

    Raises:
        UsageError: a file or size is missing or invalid.
    """
    end = flags.null_tokenizer_eod_id
    if flags.tokenizer_type == "NullTokenizer":
        if flags.vocab_size is None:
            raise UsageError(
                "--tokenizer-type NullTokenizer requires --vocab-size", remedy="Add --vocab-size N."
            )
        return NullTokenizer(flags.vocab_size, end)
    if end is not None:
        raise UsageError(
            "--null-tokenizer-eod-id requires --tokenizer-type NullTokenizer, but got "
            f"{flags.tokenizer_type}",
            remedy="Remove --null-tokenizer-eod-id.",
        )
    if flags.tokenizer_type == "HuggingFaceTokenizer":
        if flags.tokenizer_model is None:
            raise UsageError(
                "--tokenizer-type HuggingFaceTokenizer requires --tokenizer-model",
                remedy="Add --tokenizer-model DIR.",
            )
        return HuggingFaceTokenizer(flags.tokenizer_model)
    from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer

    vocabulary = _gpt2_file("--vocab-file", flags.vocab_file)
    return GPT2Tokenizer(vocabulary, _gpt2_file("--merge-file", flags.merge_file))


def _gpt2_file(flag: str, path: str | None) -> str:
    """Return the path of one of the GPT-2 tokenizer's files.

    Raises:
        UsageError: the flag is missing.
    """
    if path is None:
        raise UsageError(
            f"{flag} is required, because the default tokenizer reads GPT-2's vocab.json and merges.txt",
            remedy="Pass both files, or use --tokenizer-type NullTokenizer.",
        )
    return path


# what decides the words of a Hugging Face tokenizer's ids, of whatever kind it is
_OF_HUGGING_FACE = ("*.model", "*.json", "*.txt", "*.tiktoken")
_OF_MODELS = ("config.json", "generation_config.json", "*.index.json", "trainer_state.json", "arguments.json")


def hashes(flags: TokenizerFlags) -> dict[str, str]:
    """Return the SHA-256 hash of each tokenizer file by name.

    The sums are used to detect a changed vocabulary.
    """
    if flags.tokenizer_type == "NullTokenizer":
        return {}
    if flags.tokenizer_type != "HuggingFaceTokenizer":
        return {name: _hash(Path(getattr(flags, name))) for name in ("vocab_file", "merge_file")}
    folder = Path(str(flags.tokenizer_model))
    if folder.is_file():
        return {folder.name: _hash(folder)}
    paths = {path for pattern in _OF_HUGGING_FACE for path in folder.glob(pattern) if path.is_file()}
    others = {path for pattern in _OF_MODELS for path in folder.glob(pattern)}
    return {path.name: _hash(path) for path in sorted(paths - others)}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class DatasetTokenizer:
    """The tokenizer interface that megatron-core's datasets use: vocabulary size, end of document, and
    identity.

    The identity is part of the name of cached indices, so it must be the same in every run.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size, self.eod = tokenizer.vocab_size, tokenizer.eod
        kind = type(tokenizer).__name__
        self.unique_identifiers = OrderedDict(type=kind, vocab_size=self.vocab_size, eod=self.eod)
