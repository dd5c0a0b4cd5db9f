"""Overlapping windows: every token is in one, and each is a document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import indexed_dataset
from megatron_npu.data.preprocessing.windows import Windows
from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from tests.conftest import Vocabulary
from tests.unit.preprocessing.conftest import SAMPLE
from tests.unit.preprocessing.test_command import texts


@given(tokens=st.integers(1, 60), length=st.integers(1, 20), stride=st.integers(1, 20), itemsize=st.just(2))
def test_no_token_is_lost(tokens: int, length: int, stride: int, itemsize: int) -> None:
    stride = min(stride, length)
    document = bytes(range(tokens * itemsize))
    cut = Windows(length, stride)
    starts, windows = cut.starts(tokens), list(cut.cut(document, itemsize))
    assert starts[:-1] == [number * stride for number in range(len(starts) - 1)]
    assert all(len(window) == min(length, tokens) * itemsize for window in windows)
    seen = {place for start in starts for place in range(start, min(start + length, tokens))}
    assert seen == set(range(tokens))
    assert windows == [document[start * itemsize : (start + length) * itemsize] for start in starts]


def test_windows_of_a_dataset(
    tiny: Vocabulary,
    tmp_path: Path,
    preprocess: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = GPT2Tokenizer(*tiny)
    (tmp_path / "long.txt").write_text(SAMPLE, encoding="utf-8")
    (tmp_path / "short.txt").write_text("rose", encoding="utf-8")
    files = (tmp_path / "long.txt", tmp_path / "short.txt")
    flags = ["--append-eod", "--seq-length", "16", "--stride", "8"]
    prefix = preprocess(*files, flags=flags)
    ids = [*tokenizer.encode(SAMPLE), tokenizer.eod]
    starts = [*range(0, len(ids) - 16, 8), len(ids) - 16]
    expected = [tokenizer.decode(ids[start : start + 16]) for start in starts]
    assert texts(prefix, tokenizer) == [*expected, "rose<|endoftext|>"]
    assert indexed_dataset.validate(prefix).documents == len(starts) + 1
    assert "shorter than --seq-length 16, at the ends of documents: 1;" in capsys.readouterr().out
    again = preprocess(*files, prefix="again", flags=[*flags, "--workers", "2"])
    assert again.with_suffix(".bin").read_bytes() == prefix.with_suffix(".bin").read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stride", "8"], "--stride requires --seq-length"),
        (["--seq-length", "8"], "--seq-length requires --stride"),
        (["--seq-length", "8", "--stride", "9"], "--stride must be at most --seq-length 8, but got 9"),
    ],
)
def test_flags_that_do_not_fit(
    tmp_path: Path, preprocess: Callable[..., Path], flags: list[str], message: str
) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UsageError, match=message):
        preprocess(tmp_path / "a.txt", flags=flags)
