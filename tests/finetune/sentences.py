"""Sentence-split data of made-up words, as `megatron-npu preprocess --split-sentences` writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_npu.data.preprocessing import indexed_dataset

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = 40  # each of a first piece and one that goes on
USED = 10  # of them; the rest can be learned not to be there


def write_vocabulary(path: Path) -> Path:
    """Write a ``vocab.txt``: special tokens, then for each word its first piece and the one behind it."""
    pieces = [piece for number in range(WORDS) for piece in (f"w{number}", f"##x{number}")]
    path.write_text("\n".join([*SPECIAL, *pieces]) + "\n")
    return path


def write(prefix: Path, documents: int = 40, seed: int = 0, sentences: int = 4) -> Path:
    """Write documents of sentences that count through the words used; return the prefix."""
    generator = np.random.default_rng(seed)
    with indexed_dataset.Writer(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            first = int(generator.integers(USED))
            rows = [_sentence(first + 3 * number, generator) for number in range(sentences)]
            lengths = np.array([len(row) for row in rows], np.int32)
            writer.add(np.concatenate(rows).astype(np.uint16).tobytes(), lengths, np.array([sentences]))
        writer.finish()
        indexed_dataset.publish([writer])
    return prefix


def _sentence(first: int, generator: np.random.Generator) -> np.ndarray:
    words = (first + np.arange(int(generator.integers(3, 6)))) % USED
    pieces = np.stack([2 * words, 2 * words + 1], 1).reshape(-1) + len(SPECIAL)
    return pieces
