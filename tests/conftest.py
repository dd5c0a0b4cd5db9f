"""Fixtures for all tests: data that is there on some machines only."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Vocabulary(NamedTuple):
    """The two files of a GPT-2 tokenizer."""

    vocab_file: Path
    merge_file: Path


@pytest.fixture(scope="session")
def gpt2_vocab() -> Vocabulary:
    """GPT-2's own vocabulary: from ../shared/data, or as `make demo` fetches it; else the test is skipped."""
    for directory in (ROOT.parent / "shared" / "data", ROOT / "runs" / "demo" / "data"):
        found = Vocabulary(directory / "gpt2-vocab.json", directory / "gpt2-merges.txt")
        if all(path.is_file() for path in found):
            return found
    pytest.skip("no gpt2-vocab.json and gpt2-merges.txt in ../shared/data or runs/demo/data (make demo)")
