"""The program that a document on DistributedDataParallel prints, from the document's text.

The text is not part of this project. In it the program has lost most of its line breaks and all of its
indentation; ``_LAYOUT`` gives them back: for each line its indentation and its length.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

# first line and number of lines of each block of code in the text
_BLOCKS = ((31, 8), (44, 4), (51, 5))
_LAYOUT = """
0:9 0:11 0:12 0:15 0:39 0:34 0:59 0:68 0:71 0:58 1:39 1:39 1:68 1:27 0:52 0:82 0:29 2:72 2:80 2:88 2:32 0:2
1:53 1:14 1:94 1:13 2:38 3:42 1:26 2:83 2:91 2:56 2:64 1:5 2:15 1:37 1:71 1:32 1:41 1:53 1:52 1:31 2:13 2:62
3:32 4:13 3:21 3:16 3:30 4:44 3:5 4:79 4:75 3:42 4:22 3:20 3:62 3:15 3:30 4:69 3:16 3:34 3:85 3:48 4:74 4:80
3:1 3:26 4:31 4:27 4:37 2:32 3:66 3:72 2:1 2:78 1:23 1:61 0:17 2:74 2:82 0:2 1:33 1:32 2:26 3:69 3:65 3:106
2:38 3:61 3:72 2:1 2:56 2:78 1:15 2:32 3:15 3:83 3:91 3:53 3:61 1:39 0:57 0:60 0:64 0:74 0:48 0:26 1:44 1:51
1:61 1:22 1:14 1:27 1:21 1:30 1:26 1:19 1:24 1:18 1:13 1:14 1:94 1:90 1:26 2:23 2:70 2:40 1:2 1:24 2:21 2:53
1:1 1:19 1:15 1:14 1:18 1:23 1:13 1:16 1:22 2:159 1:1 1:22 1:18 1:15 1:13 1:13 1:51 1:27 1:13 1:29 1:17 1:18
1:13 1:14 1:17 1:9 2:25 2:249 1:35
"""
# What the document leaves to its earlier chapters, and the tokenizer that would be downloaded.
_CHAPTERS = """from gpt import GPTModel, calc_loss_batch, calc_loss_loader, generate_text
from text_data import LLMDataset
import text_data
class tiktoken: encoding_for_model = staticmethod(text_data.tokenizer_for)
"""


def program() -> str:
    """Return the program as printed; the test is skipped where the document is not."""
    documents = sorted((ROOT.parent / "shared" / "seeds").glob("004_*.txt"))
    if not documents:
        pytest.skip("no text of the document in ../shared/seeds")
    lines = documents[0].read_text(encoding="utf-8").splitlines()
    code = "".join(line for first, count in _BLOCKS for line in lines[first - 1 : first - 1 + count])
    laid_out, at = [], 0
    for indentation, length in (map(int, word.split(":")) for word in _LAYOUT.split()):
        laid_out.append("    " * indentation + code[at : at + length])
        at += length
    assert at == len(code), "the document's text is another"
    text = "\n".join(laid_out) + "\n"
    ast.parse(text)
    return text


def with_chapters(text: str) -> str:
    """Return the program with what it takes from earlier chapters."""
    return _replaced(text, "import tiktoken\n", _CHAPTERS)


def corrected(text: str) -> str:
    """Return the program with what docs/tutorials/ddp-from-scratch.md corrects in it, on any device."""
    own = "train_loader.sampler.rank = rank"
    text = _replaced(
        text, "=DistributedSampler(train_dataset", "=DistributedSampler(train_dataset, world_size, rank=0"
    )
    text = _replaced(text, "    model.to(rank)\n", f"    {own}\n    model.to(rank)\n")
    return _replaced(text, "=model.pos_emb", "=model.module.pos_emb")


def sized(text: str, **values: object) -> str:
    """Return the program with other values of the variables that its last part sets."""
    for name, value in values.items():
        text, count = re.subn(rf"^    {name} = .*$", f"    {name} = {value!r}", text, flags=re.MULTILINE)
        assert count, name
    return text


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def write(text: str, folder: Path) -> Path:
    """Write the program beside what it takes from earlier chapters; return its path."""
    path = folder / "ddp_train.py"
    path.write_text(text, encoding="utf-8")
    return path
