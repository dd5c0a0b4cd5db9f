"""Check that the tokenizers of the trainer and of transformers encode and decode identically.

If their token ids differ, even a model with bitwise identical weights generates gibberish or never stops.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import verify
from megatron_npu.conversion.tokenizer import tokenizer_corpus
from megatron_npu.data.tokenization.gpt2_bpe import END_OF_TEXT, GPT2Tokenizer
from megatron_npu.data.tokenization.hf import HuggingFaceTokenizer

Tokenizer = GPT2Tokenizer | HuggingFaceTokenizer
_DECODED_AT_ONCE = 32
_SHOWN = 12


def reference(folder: Path) -> Any:
    """Return the tokenizer that transformers creates from a folder, without executing the folder's code.

    Raises:
        UsageError: transformers cannot create it.
    """
    import transformers

    verify.silence(transformers)
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of any kind: packages that are not installed, broken files, code
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(
            f"transformers cannot read the tokenizer in {folder}: {reason}. Get a fresh copy of its files, "
            "or pass --tokenizer-type NullTokenizer to convert without a tokenizer."
        ) from error


def require_equal(ours: Tokenizer, theirs: Any) -> str:
    """Check that two tokenizers agree, and return a log line about the result.

    Raises:
        UsageError: the tokenizers differ; the error gives an example.
    """
    found = difference(ours, theirs)
    if found is not None:
        raise UsageError(
            f"the {type(ours).__name__} and transformers' tokenizer must produce the same tokens, but they "
            f"differ: {found}. Nothing was written, because the model would read and write different tokens "
            "than in training."
        )
    line = f"both tokenizers agree on {len(_texts(ours, theirs))} texts and {len(ours.vocabulary)}"
    return f"{line} tokens; a text ends with {theirs.eos_token} ({ours.eod})"


def difference(ours: Tokenizer, theirs: Any) -> str | None:
    """Return an example text for which two tokenizers differ, or None.

    Megatron's GPT2BPETokenizer never recognizes ``<|endoftext|>`` inside a text as the special token, so such
    texts are not compared.

    Args:
        ours: the trainer's tokenizer.
        theirs: the return value of ``reference``.
    """
    return next(_differences(ours, theirs), None)


def _differences(ours: Tokenizer, theirs: Any) -> Iterator[str]:
    yield from _other_tokens(ours.vocabulary, theirs.get_vocab())
    if ours.eod != theirs.eos_token_id:
        yield (
            f"a text ends with token {ours.eod} in ours and with token {theirs.eos_token_id} in that of "
            "transformers"
        )
    for text in _texts(ours, theirs):
        yield from _read_otherwise(ours, theirs, text)
    ids = list(ours.vocabulary.values())
    random.Random(0).shuffle(ids)
    for first in range(0, len(ids), _DECODED_AT_ONCE):
        yield from _written_otherwise(ours, theirs, ids[first : first + _DECODED_AT_ONCE])


def _texts(ours: Tokenizer, theirs: Any) -> list[str]:
    tokens = {*theirs.get_added_vocab(), *theirs.all_special_tokens, *_added(ours)}
    return list(tokenizer_corpus.texts(tokens - ({END_OF_TEXT} if _is_gpt2(ours) else set())))


def _is_gpt2(ours: Tokenizer) -> bool:
    return isinstance(ours, GPT2Tokenizer)


def _added(ours: Tokenizer) -> Iterable[str]:
    return ours.added_tokens if isinstance(ours, HuggingFaceTokenizer) else ()


def _other_tokens(ours: dict[str, int], theirs: dict[str, int]) -> Iterator[str]:
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            yield (
                f"the token {token!r} has id {_shown(ours.get(token))} in ours and "
                f"{_shown(theirs.get(token))} in that of transformers"
            )


def _read_otherwise(ours: Tokenizer, theirs: Any, text: str) -> Iterator[str]:
    here, there = ours.encode(text), theirs.encode(text)
    if here != there:
        yield (
            f"{_cut(text)!r} is encoded as {_numbers(here)} by ours and as {_numbers(there)} by that of "
            "transformers"
        )
    yield from _written_otherwise(ours, theirs, here)


def _written_otherwise(ours: Tokenizer, theirs: Any, ids: list[int]) -> Iterator[str]:
    written = ids if isinstance(ours, GPT2Tokenizer) else ours.without_beginning(ids)
    here = ours.decode(ids)
    there = theirs.decode(written, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if here != there:
        yield (
            f"{_numbers(ids)} is decoded as {_cut(here)!r} by ours and as {_cut(there)!r} by that of "
            "transformers"
        )


def _shown(token: int | None) -> str:
    return "none" if token is None else str(token)


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"


def _numbers(ids: Sequence[int]) -> str:
    more = " …" if len(ids) > _SHOWN else ""
    return f"{len(ids)} tokens ({' '.join(map(str, ids[:_SHOWN]))}{more})"
