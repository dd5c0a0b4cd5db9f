"""Define the settings of each tokenizer, which are small enough to be sent to each worker process."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization.bert_wordpiece import BertWordPieceTokenizer
from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from megatron_npu.data.tokenization.hf import HuggingFaceTokenizer
from megatron_npu.data.tokenization.null import NullTokenizer

GPT2, HUGGING_FACE = "GPT2BPETokenizer", "HuggingFaceTokenizer"
NULL = "NullTokenizer"
BERT = {"BertWordPieceLowerCase": True, "BertWordPieceCase": False}  # -> in lower case
KINDS = (GPT2, HUGGING_FACE, *BERT, NULL)


@dataclass(frozen=True)
class GPT2Files:
    """The settings of a GPT-2 tokenizer: the files ``vocab.json`` and ``merges.txt``."""

    vocab_file: str
    merge_file: str

    def build(self) -> GPT2Tokenizer:
        """Build the GPT-2 tokenizer.

        Raises:
            UsageError: the files are invalid.
        """
        return GPT2Tokenizer(self.vocab_file, self.merge_file)


@dataclass(frozen=True)
class BertFiles:
    """The settings of a BERT tokenizer: the file ``vocab.txt``."""

    vocab_file: str
    lower_case: bool

    def build(self) -> BertWordPieceTokenizer:
        """Build the BERT tokenizer.

        Raises:
            UsageError: the file is invalid.
        """
        return BertWordPieceTokenizer(self.vocab_file, lower_case=self.lower_case)


@dataclass(frozen=True)
class HuggingFaceFiles:
    """The settings of a Hugging Face tokenizer: a folder with ``tokenizer.json``.

    Attributes:
        folder: the path of the folder.
        special_tokens: whether to keep the tokens that the tokenizer adds to every text, such as ``<s>``.
    """

    folder: str
    special_tokens: bool = False

    def build(self) -> HuggingFaceTokenizer:
        """Build the Hugging Face tokenizer.

        Raises:
            UsageError: the files are invalid.
        """
        return HuggingFaceTokenizer(self.folder)


@dataclass(frozen=True)
class Numbers:
    """The settings of a NullTokenizer.

    A NullTokenizer needs no files, because the text consists of ids.

    Attributes:
        size: the number of ids, without the end-of-document id.
        end: the end-of-document id. If None, it is the last id.
    """

    size: int
    end: int | None = None

    def build(self) -> NullTokenizer:
        """Build the NullTokenizer.

        Raises:
            UsageError: the end-of-document id does not exist.
        """
        return NullTokenizer(self.size, self.end)


def shown(files: TokenizerFiles) -> str:
    """Return the flag that specifies the vocabulary, together with its value."""
    if isinstance(files, HuggingFaceFiles):
        return f"--tokenizer-model {files.folder}"
    if isinstance(files, Numbers):
        return f"--vocab-size {files.size}"
    return f"--vocab-file {files.vocab_file}"


TokenizerFiles = GPT2Files | BertFiles | HuggingFaceFiles | Numbers


def named_by(arguments: argparse.Namespace) -> TokenizerFiles:
    """Return the settings of the tokenizer that the flags select.

    Raises:
        UsageError: a flag is missing.
    """
    kind = arguments.tokenizer_type
    if kind == NULL:
        _require(arguments, "vocab_size")
        return Numbers(arguments.vocab_size, arguments.null_tokenizer_eod_id)
    for name in ("vocab_size", "null_tokenizer_eod_id"):
        if getattr(arguments, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} can be used only with --tokenizer-type {NULL}, but got "
                f"--tokenizer-type {kind}. Remove it."
            )
    if kind == HUGGING_FACE:
        _require(arguments, "tokenizer_model")
        return HuggingFaceFiles(arguments.tokenizer_model, arguments.tokenizer_hf_include_special_tokens)
    if kind in BERT:
        _require(arguments, "vocab_file")
        return BertFiles(arguments.vocab_file, BERT[kind])
    _require(arguments, "vocab_file", "merge_file")
    return GPT2Files(arguments.vocab_file, arguments.merge_file)


def _require(arguments: argparse.Namespace, *names: str) -> None:
    missing = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is None]
    if missing:
        raise UsageError(
            f"--tokenizer-type {arguments.tokenizer_type} requires {' and '.join(missing)}. Add the "
            "missing flags."
        )
