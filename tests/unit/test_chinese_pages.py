"""The Chinese pages say what the English ones do: the same commands, flags and variables."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

DOCS = ROOT / "docs"


def commands(path: str) -> list[str]:
    """Return the lines of a page's bash blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / path).read_text(encoding="utf-8"), re.DOTALL)
    lines = [re.sub(r"\s*(?<!\S)#.*", "", line) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.strip()]


def first_cells(path: str) -> list[str]:
    """Return the names in backquotes that begin the rows of a page's tables, in order."""
    rows = re.findall(r"^\| \[?`([^`]+)`", (DOCS / path).read_text(encoding="utf-8"), re.M)
    return [name.replace("\\|", "|") for name in rows]


def test_the_guide_has_the_commands_of_the_english_page():
    assert commands("zh/ascend-gpt.md") == commands("tutorials/ascend-gpt.md")


def test_the_page_of_flags_has_the_rows_of_the_english_page():
    assert first_cells("zh/flags.md") == first_cells("reference/flags.md")


@pytest.mark.parametrize("page", ["quick-start-npu.md", "switch-from-mindspeed.md"])
def test_commands_are_those_of_the_english_page(page):
    english = {"quick-start-npu.md": "tutorials/", "switch-from-mindspeed.md": "how-to/"}[page] + page
    left = [line for line in commands(f"zh/{page}") if line not in commands(english)]
    assert not left
