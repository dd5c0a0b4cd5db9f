"""``.bin/.idx`` data for Transformers models: BERT's masked sentence pairs, GPT's windows.

Samples come from megatron-core's datasets, whose indices are stored beside the data or in
``--data-cache-path``, and get Transformers' names. Pairs need sentence-split data (``megatron-npu preprocess
--split-sentences``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import indexed_dataset
from megatron_npu.data.tokenization import unknown as unknown_tokens
from megatron_npu.finetune.data.labels import IGNORED
from megatron_npu.finetune.data.word_pieces import WordPieces, word_pieces
from megatron_npu.finetune.rapidformer import state
from megatron_npu.pretrain.data import datasets, tokenizers
from megatron_npu.pretrain.data.sources import PARTS, blend, sizes_of_parts, split_shares, tell_of_repeated
from megatron_npu.pretrain.flags.checks import machine

_MAX_NGRAM = 3  # words that are masked together at most, as Megatron's pretrain_bert.py has it

Prefix = str | Sequence[str]
Found = list[tuple[str, indexed_dataset.DatasetSummary]]  # prefixes, and what is there
Parts = tuple[Dataset | None, Dataset | None, Dataset | None]


def build_train_valid_test_datasets_for_huggingface(
    data_prefix: Prefix,
    data_impl: str,
    splits_string: str,
    train_valid_test_num_samples: Sequence[int],
    max_seq_length: int,
    masked_lm_prob: float,
    short_seq_prob: float,
    seed: int,
    skip_warmup: bool = True,
    binary_head: bool = True,
) -> Parts:
    """Return masked sentence pairs for ``BertForPreTraining``: training, validation, test.

    Each sample has ``input_ids``, ``attention_mask``, ``token_type_ids`` and ``labels`` (-100 where nothing
    is predicted), [s] int64, and with ``binary_head`` a ``next_sentence_label``: 1 if the second part does
    not follow the first. Sampling is megatron-core's (``BERTMaskedWordPieceDataset``): whole words, up to
    three together. The vocabulary comes from the run's flags. All ranks must call this.

    Args:
        data_prefix: one prefix, several, or alternating weights and prefixes.
        data_impl: ``mmap``, ``lazy``, ``cached`` or ``infer``; the format is always detected from the files.
        splits_string: proportions of the documents, such as ``980,20``.
        train_valid_test_num_samples: number of samples per split; 0: None is returned for it.
        max_seq_length: tokens per sample, [s], including special tokens and padding.
        masked_lm_prob: fraction of the tokens to predict.
        short_seq_prob: fraction of shortened samples.
        seed: random seed for order and masks.
        skip_warmup: no effect; the operating system prefetches files.
        binary_head: return pairs; otherwise one text per sample.

    Raises:
        UsageError: the data does not exist, is not split into sentences, or uses another vocabulary.
    """
    machine.require_megatron_core()
    from megatron.core.datasets.bert_dataset import (
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
    )

    pieces = word_pieces(state.get_args())
    weights, found = _validated(data_prefix, data_impl, pieces.vocab_size)
    for prefix, summary in found:
        if binary_head:
            _require_sentences(prefix, summary)
        _require_parts(prefix, summary.documents, splits_string, train_valid_test_num_samples)
    _require_probability("--mask-prob", masked_lm_prob)
    config = BERTMaskedWordPieceDatasetConfig(
        **_common(seed, max_seq_length, found, weights, splits_string),
        tokenizer=pieces,
        masking_probability=masked_lm_prob,
        short_sequence_probability=short_seq_prob,
        masking_max_ngram=_MAX_NGRAM,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=binary_head,
    )
    parts = datasets.build(BERTMaskedWordPieceDataset, train_valid_test_num_samples, config)
    built = _each(parts, lambda part: MaskedPairs(part, pieces, binary_head))
    around = {pieces.cls, pieces.sep, pieces.pad, IGNORED}
    _warn_of_unknown_tokens(built[0], _asked, pieces.unknown, around)
    return built


class MaskedPairs(Dataset):
    """megatron-core's masked sentence pairs under Transformers' names.

    Args:
        pairs: a ``BERTMaskedWordPieceDataset``, or a blend.
        pieces: the vocabulary.
        binary_head: whether samples have a next-sentence label.
    """

    def __init__(self, pairs: Any, pieces: WordPieces, binary_head: bool) -> None:
        self.pairs, self.pieces, self.binary_head = pairs, pieces, binary_head

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return one sample; its tensors are [s] int64."""
        sample = self.pairs[number]
        tokens = torch.from_numpy(sample["text"])
        # the last separator ends a sample, and nothing behind it equals one: versions pad otherwise
        there = torch.arange(len(tokens)) <= (tokens == self.pieces.sep).nonzero().max()
        labels = torch.from_numpy(sample["labels"])
        result = {
            "input_ids": tokens.where(there, self.pieces.pad),
            "attention_mask": there.long(),
            "token_type_ids": torch.from_numpy(sample["types"]).where(there, 0),
            "labels": labels.where(torch.from_numpy(sample["loss_mask"]).bool(), IGNORED),
        }
        if self.binary_head:
            result["next_sentence_label"] = torch.tensor(int(sample["is_random"]))
        return result


def build_causal_datasets_for_huggingface(
    data_prefix: Prefix,
    data_impl: str,
    splits_string: str,
    train_valid_test_num_samples: Sequence[int],
    seq_length: int,
    seed: int,
    skip_warmup: bool = True,
) -> Parts:
    """Return windows for a causal Transformers model: training, validation, test.

    Each sample has ``input_ids`` and ``labels``, [s] int64; Transformers models shift the labels themselves,
    so a window starts with the last token of the previous one. With ``--eod-mask-loss`` the label after an
    end-of-document token is -100. All ranks must call this.

    Args:
        data_prefix, data_impl, splits_string, train_valid_test_num_samples, seed, skip_warmup: as for
            ``build_train_valid_test_datasets_for_huggingface``.
        seq_length: tokens per window, [s].

    Raises:
        UsageError: the data does not exist, or uses another vocabulary.
    """
    parts = _windows(
        data_prefix, data_impl, splits_string, train_valid_test_num_samples, seq_length - 1, seed
    )
    built = _each(parts, CausalWindows)
    unknown = tokenizers.build(state.get_args()).unknown
    _warn_of_unknown_tokens(built[0], lambda sample: sample["input_ids"], unknown)
    return built


class CausalWindows(Dataset):
    """megatron-core's GPT windows under Transformers' names.

    Args:
        windows: a ``GPTDataset``, or a blend, with s - 1 tokens and labels.
    """

    def __init__(self, windows: Any) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return one sample; its tensors are [s] int64."""
        sample = self.windows[number]
        text = _text(sample)
        return {
            "input_ids": text,
            "labels": torch.cat([text[:1], text[1:].where(sample["loss_mask"].bool(), IGNORED)]),
        }


def build_train_valid_test_datasets(
    data_prefix: Prefix,
    data_impl: str,
    splits_string: str,
    train_valid_test_num_samples: Sequence[int],
    seq_length: int,
    seed: int,
    skip_warmup: bool = True,
) -> Parts:
    """Return Megatron's GPT windows: samples with ``text``, [s + 1] int64. All ranks must call this.

    The name and arguments are those of Megatron-LM's ``megatron.data.gpt_dataset``.

    Args:
        data_prefix, data_impl, splits_string, train_valid_test_num_samples, seed, skip_warmup: as for
            ``build_train_valid_test_datasets_for_huggingface``.
        seq_length: number of input tokens of the model.

    Raises:
        UsageError: the data does not exist, or uses another vocabulary.
    """
    parts = _windows(data_prefix, data_impl, splits_string, train_valid_test_num_samples, seq_length, seed)
    return _each(parts, Texts)


class Texts(CausalWindows):
    """megatron-core's GPT windows as a single token tensor each, one token longer than the model's input."""

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return one sample, [s + 1] int64."""
        return {"text": _text(self.windows[number])}


def _text(sample: dict[str, Tensor]) -> Tensor:
    return torch.cat([sample["tokens"], sample["labels"][-1:]]).long()


def _windows(
    data_prefix: Prefix, data_impl: str, split: str, sizes: Sequence[int], length: int, seed: int
) -> datasets.Datasets:
    machine.require_megatron_core()
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    args = state.get_args()
    tokenizer = tokenizers.DatasetTokenizer(tokenizers.build(args))
    weights, found = _validated(data_prefix, data_impl, tokenizer.vocab_size)
    for prefix, summary in found:
        _require_parts(prefix, summary.sequences, split, sizes)
        if summary.sequences > summary.documents and args.rank == 0:
            print(
                f"megatron_npu: {prefix} is split into sentences, which megatron-core's windows would mix "
                "in arbitrary order; preprocess without --split-sentences to keep documents whole",
                flush=True,
            )
    config = GPTDatasetConfig(
        **_common(seed, length, found, weights, split),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    return datasets.build(GPTDataset, sizes, config)


def _common(seed: int, length: int, found: Found, weights: list[float] | None, split: str) -> dict[str, Any]:
    """Return the options that the configurations of all megatron-core datasets share."""
    return {
        "random_seed": seed,
        "sequence_length": length,
        "blend": ([prefix for prefix, _ in found], weights),
        "split": split,
        "path_to_cache": getattr(state.get_args(), "data_cache_path", None),
    }


def _validated(given: Prefix, data_impl: str, vocab_size: int) -> tuple[list[float] | None, Found]:
    """Return the blend weights (or None) and the prefixes, after checking their files and vocabulary."""
    if data_impl not in ("mmap", "lazy", "cached", "infer"):
        raise UsageError(
            f"--data-impl {data_impl}",
            "mmap, lazy, cached or infer",
            "Create the data with `megatron-npu preprocess`.",
        )
    if not given:
        raise UsageError("no --data-path", "the prefix of a .bin and .idx file", "Pass one.")
    weights, prefixes = blend([given] if isinstance(given, str) else list(given))
    tell_of_repeated(prefixes)
    return weights, [(prefix, indexed_dataset.validate(prefix, vocab_size)) for prefix in prefixes]


def _require_sentences(prefix: str, found: indexed_dataset.DatasetSummary) -> None:
    """Reject data with one sequence per document: a pair needs two, and upstream would search endlessly."""
    if found.sequences <= found.documents:
        raise UsageError(
            f"{prefix} has {found.documents} documents with one sequence each",
            "documents of several sentences, from which sentence pairs are made",
            "Create the data with `megatron-npu preprocess --split-sentences`.",
        )


def _require_parts(prefix: str, count: int, split: str, sizes: Sequence[int]) -> None:
    """Reject a split that is used and has a share but no document: upstream would search it endlessly."""
    shares = split_shares(split)
    for name, share, part, size in zip(PARTS, shares, sizes_of_parts(shares, count), sizes, strict=True):
        if size and share and not part:
            raise UsageError(
                f"--split {split!r} leaves no document of the {count} in {prefix} for {name}",
                "a share of 0, or enough documents for it",
                "Change --split.",
            )


def _require_probability(flag: str, value: float) -> None:
    if not 0 < value < 1:
        raise UsageError(f"{flag} {value}", "a number between 0 and 1", "Change it.")


def _asked(sample: dict[str, Tensor]) -> Tensor:
    """Return the original tokens of a masked pair, [s] int64."""
    return sample["labels"].where(sample["labels"] != IGNORED, sample["input_ids"])


def _warn_of_unknown_tokens(
    part: Any, tokens: Callable[[Any], Tensor], unknown: int | None, around: Iterable[int] = ()
) -> None:
    """Warn if most tokens of the first samples are unknown to the vocabulary.

    Args:
        part: the training dataset; None: do nothing.
        tokens: returns the tokens of a sample.
        unknown: id of the unknown token; None: do nothing.
        around: ids of special tokens, which are not counted.
    """
    args = state.get_args()
    if part is None or unknown is None or args.rank != 0:
        return
    found = torch.cat([tokens(part[i]) for i in range(min(len(part), unknown_tokens.SAMPLES))])
    found = found[~torch.isin(found, torch.tensor([*around], dtype=torch.int64))]
    named = args.vocab_file or args.tokenizer_model or args.pretrained_model_name_or_path
    count = int((found == unknown).sum())
    if told := unknown_tokens.warning(
        count, found.numel(), "the training data", f"the vocabulary of {named}"
    ):
        print(f"megatron-npu train: {told}", file=sys.stderr, flush=True)


def _each(parts: datasets.Datasets, wrap: Any) -> Parts:
    train, valid, test = (
        None if part is None else wrap(part) for part in (parts.train, parts.valid, parts.test)
    )
    return train, valid, test
