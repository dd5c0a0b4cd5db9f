"""Add methods that generation requires to the tokenizers of GPT-2 and BERT, and load tokenizers from local
files.

Patches ``datasets.megatron_tokenizer``, ``tokenizers.text.text_tokenizer`` and, in
``tokenizers.text.libraries``, ``huggingface_tokenizer`` and ``megatron_hf_tokenizer`` of ``megatron.core``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around, installed, replace
from megatron_npu.base.errors import UsageError

_TOKENIZER = "megatron.core.datasets.megatron_tokenizer"
_NO_METHOD = (
    "GPT-2's and BERT's tokenizers lack this method, which the text-generation server calls for every"
    " answer, so the server returns HTTP 500"
)


@replace(
    f"{_TOKENIZER}:MegatronTokenizer.offsets",
    versions="<0.15",
    upstream_bug=True,
    until=NOT_FIXED,
    why=_NO_METHOD,
)
@replace(
    f"{_TOKENIZER}:MegatronLegacyTokenizer.offsets",
    versions=">=0.15,<0.17",
    upstream_bug=True,
    until=NOT_FIXED,
    why=_NO_METHOD,
)
def offsets(self: Any, ids: list[int], text: str) -> list[int]:
    """Return the position in the detokenized ``text`` at which each of ``ids`` begins.

    A token that continues a multi-byte character begins where that character begins, as with tiktoken. This
    is used for tokenizers that have no such method.

    Raises:
        NotImplementedError: the tokenizer cannot detokenize either.
    """
    starts, begin = [], 0
    for count in range(len(ids)):
        begin = _common_length(self.detokenize(ids[:count]), text, begin)
        starts.append(begin)
    return starts


@around(
    "megatron.core.tokenizers.text.text_tokenizer:MegatronTokenizerText.offsets",
    versions=">=0.17",
    upstream_bug=True,
    until=NOT_FIXED,
    why=(
        "the tokenizers of Hugging Face, GPT-2 and BERT lack this method, which the text-generation "
        "server calls for every answer, so the server returns HTTP 500"
    ),
)
def offsets_without_a_method(
    original: Callable[..., list[int]], self: Any, ids: list[int], text: str
) -> list[int]:
    """Return the positions of tokens, which are computed from the text if the tokenizer has no method for
    this.
    """
    if hasattr(self._tokenizer, "offsets"):
        return original(self, ids, text)
    return offsets(self, ids, text)


def _common_length(start: str, text: str, known: int) -> int:
    """Return the length of the longest common prefix of two strings, which is at least ``known``."""
    while known < min(len(start), len(text)) and start[known] == text[known]:
        known += 1
    return known


@replace(
    f"{_TOKENIZER}:MegatronLegacyTokenizer.bos",
    versions=">=0.15,<0.17",
    upstream_bug=True,
    until=NOT_FIXED,
    why=(
        "GPT-2's tokenizer has no such token, and the inference engines compare this token with each "
        "prompt's first token: the tokenizer raises NotImplementedError where the engines expect None"
    ),
)
def bos(self: Any) -> None:
    """Return None, because this tokenizer has no beginning-of-text token."""


@around(
    "megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer:MegatronHFTokenizer.__init__",
    versions=">=0.15,<0.17",
    why=(
        "upstream asks the Hugging Face hub for the tokenizer's files regardless of the given files; "
        "without a network it prints two tracebacks that do not say what to do"
    ),
)
def name_the_flag(
    original: Callable[..., None], self: Any, tokenizer_path: str, *args: Any, **kwargs: Any
) -> None:
    """If the hub is unreachable, raise an error that names the flag for local tokenizer files."""
    try:
        original(self, tokenizer_path, *args, **kwargs)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"--tokenizer-type {tokenizer_path} cannot be loaded: {reason}. Its Hugging Face files must be "
            "on this machine, or a network connection is required to download them. Add --legacy-tokenizer "
            "to read --vocab-file and --merge-file."
        ) from error


class _Layout(NamedTuple):
    """The names of tokenizer files that Transformers expects, and the tokenizer's configuration."""

    files: tuple[str, ...]
    config: dict[str, Any]


_LAYOUTS = {
    "GPT2BPETokenizer": _Layout(("vocab.json", "merges.txt"), {"tokenizer_class": "GPT2Tokenizer"}),
    "BertWordPieceLowerCase": _Layout(
        ("vocab.txt",), {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    ),
    "BertWordPieceCase": _Layout(
        ("vocab.txt",), {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    ),
}


@around(
    "megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer:MegatronHFTokenizer.__init__",
    versions=">=0.17",
    why=(
        "upstream asks the Hugging Face hub for GPT-2's and BERT's tokenizers regardless of --vocab-file "
        "and --merge-file, and the flag that read these files (--legacy-tokenizer) no longer exists"
    ),
)
def read_the_files(
    original: Callable[..., None],
    self: Any,
    tokenizer_path: str,
    vocab_file: str | None = None,
    merges_file: str | None = None,
    **kwargs: Any,
) -> None:
    """Load the tokenizer from the given files, or from the hub if one is missing.

    Raises:
        UsageError: a file does not exist, or the hub cannot be reached.
    """
    layout = _LAYOUTS.get(tokenizer_path)
    given = (vocab_file, merges_file)[: len(layout.files)] if layout else ()
    if layout is not None and all(given):
        with tempfile.TemporaryDirectory() as folder:
            _lay_out(Path(folder), layout, [Path(str(name)) for name in given])
            _reader_of_folders()(self, folder, **kwargs)
        return
    try:
        original(self, tokenizer_path, vocab_file, merges_file, **kwargs)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        raise UsageError(
            f"--tokenizer-type {tokenizer_path} cannot be loaded: {str(error).splitlines()[0]}. Its files "
            "must be on this machine, or a network connection is required to download them. Pass "
            "--vocab-file, and for GPT-2 --merge-file."
        ) from error


def _reader_of_folders() -> Callable[..., None]:
    """Return the constructor of the base class of ``MegatronHFTokenizer``."""
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer.__init__


def _lay_out(folder: Path, layout: _Layout, given: list[Path]) -> None:
    """Fill ``folder`` with the files that Transformers requires to load a tokenizer."""
    for name, file in zip(layout.files, given, strict=True):
        if not file.is_file():
            flag = "--merge-file" if name == "merges.txt" else "--vocab-file"
            raise UsageError(
                f"{flag} {file} does not exist, but a tokenizer file is required. Correct the path."
            )
        (folder / name).symlink_to(file.resolve())
    (folder / "tokenizer_config.json").write_text(json.dumps(layout.config), encoding="utf-8")


@around(
    "megatron.core.tokenizers.text.libraries.huggingface_tokenizer:HuggingFaceTokenizer.__init__",
    versions=">=0.15",
    why=(
        "without the package transformers, upstream's error is about a tokenizer's files, or about an "
        "undefined name"
    ),
)
def require_transformers(
    original: Callable[..., None], self: Any, tokenizer_path: str, *args: Any, **kwargs: Any
) -> None:
    """Raise a one-line error if Transformers is not installed."""
    if installed("transformers") is None:
        raise UsageError(
            f"the tokenizer {tokenizer_path} requires the package transformers, which is not installed. "
            "Run: pip install transformers. Before 0.17, the tokenizers of GPT-2 and BERT can also be read "
            "with --legacy-tokenizer, from --vocab-file and --merge-file."
        )
    original(self, tokenizer_path, *args, **kwargs)


@around(
    "megatron.core.tokenizers.text.libraries.huggingface_tokenizer:HuggingFaceTokenizer.add_special_tokens",
    versions=">=0.15,<0.18",
    upstream_bug=True,
    until="0.18",
    why=(
        "upstream copies the names of special tokens from Transformers, which since 5.0 has no "
        "additional_special_tokens: T5's dataset raises an AttributeError when it looks for its sentinels"
    ),
)
def keep_the_additional_tokens(
    original: Callable[..., int], self: Any, special_tokens_dict: dict[str, Any]
) -> int:
    """Store the additional tokens that the caller gave if Transformers does not provide them.

    Return the number of new tokens.
    """
    added = original(self, special_tokens_dict)
    if getattr(self, "additional_special_tokens", None) is None:
        self.additional_special_tokens = list(special_tokens_dict.get("additional_special_tokens") or [])
    return added
