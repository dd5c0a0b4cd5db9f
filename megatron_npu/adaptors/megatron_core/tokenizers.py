"""What generation asks of GPT-2's and BERT's tokenizers, and what their files are read from.

Connects ``datasets.megatron_tokenizer`` and, of ``tokenizers.text.libraries``, ``huggingface_tokenizer`` and
``megatron_hf_tokenizer`` of ``megatron.core``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around, installed, replace
from megatron_npu.errors import UsageError

_TOKENIZER = "megatron.core.datasets.megatron_tokenizer"
_NO_METHOD = (
    "GPT-2's and BERT's tokenizers have no such method, and the text-generation server calls it for every "
    "answer: HTTP 500"
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
    """Return the position in ``text``, which ``ids`` were detokenized to, at which each of them begins.

    A token that continues a character of several bytes begins where that character does, as it is with
    tiktoken. For tokenizers that have no method of their own.

    Raises:
        NotImplementedError: the tokenizer cannot detokenize either.
    """
    starts, begin = [], 0
    for count in range(len(ids)):
        begin = _common_length(self.detokenize(ids[:count]), text, begin)
        starts.append(begin)
    return starts


def _common_length(start: str, text: str, known: int) -> int:
    """Return how many characters two texts have in common from their beginning, at least ``known``."""
    while known < min(len(start), len(text)) and start[known] == text[known]:
        known += 1
    return known


@replace(
    f"{_TOKENIZER}:MegatronLegacyTokenizer.bos",
    versions=">=0.15,<0.17",
    upstream_bug=True,
    until=NOT_FIXED,
    why="GPT-2's tokenizer has none, and the inference engines compare it with each prompt's first token: "
    "NotImplementedError where they look for None",
)
def bos(self: Any) -> None:
    """Return None: no token begins a text. For tokenizers that have no property of their own."""


@around(
    "megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer:MegatronHFTokenizer.__init__",
    versions=">=0.15",
    why="it asks the hub of Hugging Face for them, whatever files are given; a machine without a network "
    "gets two tracebacks that do not tell what to do",
)
def name_the_flag(
    original: Callable[..., None], self: Any, tokenizer_path: str, *args: Any, **kwargs: Any
) -> None:
    """Say which flag reads the files, where the hub cannot be reached."""
    try:
        original(self, tokenizer_path, *args, **kwargs)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"--tokenizer-type {tokenizer_path}: {reason}",
            "Hugging Face's files of it on this machine, or a network to fetch them",
            "Add --legacy-tokenizer: then --vocab-file and --merge-file are read.",
        ) from error


@around(
    "megatron.core.tokenizers.text.libraries.huggingface_tokenizer:HuggingFaceTokenizer.__init__",
    versions=">=0.15",
    why="without the package transformers it tells of a tokenizer's files, or of a name that is not defined",
)
def require_transformers(
    original: Callable[..., None], self: Any, tokenizer_path: str, *args: Any, **kwargs: Any
) -> None:
    """Name the package where it is not installed."""
    if installed("transformers") is None:
        raise UsageError(
            f"the tokenizer {tokenizer_path} without the package transformers",
            "transformers, which reads it",
            "Run: pip install transformers. GPT-2's and BERT's are also read with --legacy-tokenizer, from "
            "--vocab-file and --merge-file.",
        )
    original(self, tokenizer_path, *args, **kwargs)
