"""Select the word-piece vocabulary for masked sentence pairs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization import bert_wordpiece
from megatron_npu.finetune.run.flag_parts import PieceFlags


@dataclass(frozen=True)
class WordPieces:
    """A word-piece vocabulary with the interface that megatron-core's datasets use.

    Attributes:
        inv_vocab: maps ids to pieces; pieces inside a word start with ``##``.
        cls, sep, mask, pad: ids of these special tokens.
        unknown: id of the unknown token, or None.
    """

    inv_vocab: dict[int, str]
    cls: int
    sep: int
    mask: int
    pad: int
    unknown: int | None = None
    unique_identifiers: OrderedDict[str, Any] = field(default_factory=OrderedDict)

    @property
    def vocab_size(self) -> int:
        """The number of ids in the vocabulary."""
        return max(self.inv_vocab) + 1

    @property
    def eod(self) -> int:
        """The id of the separator, which serves as the end-of-document token."""
        return self.sep


def _require_pieces(flags: PieceFlags, special: Mapping[str, int | None], ids: dict[str, int]) -> None:
    has_pieces = any(piece.startswith("##") for piece in ids)
    if flags.tokenizer_type.startswith("BertWordPiece") and not has_pieces:
        raise UsageError(
            f"--vocab-file {flags.vocab_file} contains no word pieces that start with ##, which masked "
            "sentence pairs require",
            remedy="Pass the vocab.txt of a BERT.",
        )
    if None in special.values() or not has_pieces:
        raise UsageError(
            f"--tokenizer-type {flags.tokenizer_type} cannot be used for masked sentence pairs, which "
            "require a WordPiece tokenizer with [CLS], [SEP], [MASK] and [PAD]. Pass --tokenizer-type "
            "BertWordPieceLowerCase and --vocab-file vocab.txt."
        )


def word_pieces(flags: PieceFlags) -> WordPieces:
    """Return the vocabulary that ``--tokenizer-type`` and the vocabulary files define.

    The vocabulary lacks ``[BOS]`` and ``[EOS]``, which Megatron adds to BERT's vocabulary, because
    Transformers models have no weights for them.

    Raises:
        UsageError: the tokenizer does not use word pieces, or its vocabulary contains none.
    """
    if flags.tokenizer_type.startswith("BertWordPiece"):
        if flags.vocab_file is None:
            raise UsageError(
                f"--tokenizer-type {flags.tokenizer_type} requires --vocab-file. Add --vocab-file vocab.txt."
            )
        ids = bert_wordpiece.read_vocabulary(flags.vocab_file)
        special = {name: ids[f"[{name.upper()}]"] for name in ("cls", "sep", "mask", "pad")}
        kind, unknown = flags.tokenizer_type, ids.get(bert_wordpiece.UNKNOWN)
    else:
        found = _of_transformers(flags)
        ids = found.get_vocab()
        special = {name: getattr(found, f"{name}_token_id") for name in ("cls", "sep", "mask", "pad")}
        kind, unknown = type(found).__name__, found.unk_token_id
    _require_pieces(flags, special, ids)
    pieces = {number: piece for piece, number in ids.items()}
    names = OrderedDict(type=kind, size=len(pieces), **special)
    return WordPieces(pieces, **special, unknown=unknown, unique_identifiers=names)


def _of_transformers(flags: PieceFlags) -> Any:
    """Return the tokenizer that --tokenizer-model names or, if it is not given, the model's own tokenizer."""
    from transformers import AutoTokenizer

    name = flags.tokenizer_model or flags.pretrained_model_name_or_path
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--tokenizer-type {flags.tokenizer_type}: there is no tokenizer in {name}. The tokenizer with "
            "which the data was created is required. Pass --tokenizer-model DIR, or --tokenizer-type "
            "BertWordPieceLowerCase --vocab-file vocab.txt."
        ) from error
