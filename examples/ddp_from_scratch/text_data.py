"""Text files to samples of tokens, and the tokenizers for it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gpt import Tokenizer


class ByteTokenizer:
    """Bytes of UTF-8 as tokens, 0 to 255: nothing to download. 256 is free for an end of text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(number for number in ids if number < 256).decode("utf-8", errors="replace")


class BpeTokenizer:
    """GPT-2's tokenizer from its two files, ``vocab.json`` and ``merges.txt``."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import ByteLevelBPETokenizer

        self._tokenizer = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


def tokenizer_for(vocabulary: str) -> Tokenizer:
    """Return the tokenizer ``bytes``, that of a folder with GPT-2's files, or one that tiktoken knows."""
    if vocabulary == "bytes":
        return ByteTokenizer()
    if Path(vocabulary).is_dir():
        return BpeTokenizer(Path(vocabulary))
    import tiktoken  # downloads the vocabulary at its first use

    return tiktoken.encoding_for_model(vocabulary)


class LLMDataset(Dataset):
    """Windows of ``context_len`` tokens over the ``.txt`` files of a folder, every ``stride`` tokens.

    Each file is a text that ends with ``special_token_id``. A sample is (inputs, targets), both
    [context_len] int64, the targets one token on.
    """

    def __init__(
        self, path: str, vocabulary: str, special_token_id: int, context_len: int, stride: int
    ) -> None:
        tokenizer, tokens = tokenizer_for(vocabulary), list[int]()
        for file in sorted(Path(path).rglob("*.txt")):
            tokens += [*tokenizer.encode(file.read_text(encoding="utf-8")), special_token_id]
        if len(tokens) <= context_len:
            raise SystemExit(
                f"{path}: {len(tokens)} tokens in .txt files; more than {context_len} are needed"
            )
        self._tokens, self._length, self._stride = torch.tensor(tokens), context_len, stride

    def __len__(self) -> int:
        return (len(self._tokens) - self._length - 1) // self._stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._tokens[index * self._stride :][: self._length + 1]
        return window[:-1], window[1:]
