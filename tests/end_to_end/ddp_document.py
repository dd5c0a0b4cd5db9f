"""The program that a document on DistributedDataParallel prints, in our own words (``ddp_as_printed.py``)."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import ROOT

PROGRAM = Path(__file__).with_name("ddp_as_printed.py")
# What the document leaves to its earlier chapters, and the tokenizer that would be downloaded.
_CHAPTERS = """from gpt import GPTModel, calc_loss_batch, calc_loss_loader, generate_text
from text_data import LLMDataset
import text_data
class tiktoken: encoding_for_model = staticmethod(text_data.tokenizer_for)
"""
_BLOCKS = ((31, 8), (44, 4), (51, 5))  # first line and number of lines of each block of code in the text


def program() -> str:
    """Return the program with the document's mistakes."""
    return PROGRAM.read_text(encoding="utf-8")


def printed() -> str | None:
    """Return the document's own program, which has lost most of its line breaks; None where it is not."""
    documents = sorted((ROOT.parent / "shared" / "seeds").glob("004_*.txt"))
    if not documents:
        return None
    lines = documents[0].read_text(encoding="utf-8").splitlines()
    return "".join(line for first, count in _BLOCKS for line in lines[first - 1 : first - 1 + count])


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
    text = _replaced(text, "torch.save(model.state_dict()", "torch.save(model.module.state_dict()")
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
