"""The groups of skipped tests that the end of ``make test`` tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import skipped


@pytest.mark.parametrize(
    ("reason", "group"),
    [
        ("Skipped: no tree of megatron_core 0.13.1: run `bash scripts/get_megatron.sh`", "a Megatron tree"),
        ("Skipped: no checkouts/megatron_core-0.12.1: run scripts/get_megatron.sh", "a Megatron tree"),
        ("no C++ compiler: the simulated Ascend cannot be built", "the simulated Ascend"),
        ("the simulated Ascend cannot be prepared: no network", "the simulated Ascend"),
        ("Skipped: could not import 'transformers': No module named 'transformers'", "a package"),
        ("Skipped: no gpt2-vocab.json and gpt2-merges.txt in ../shared/data", "data"),
        ("Skipped: needs an NPU", "an NPU"),
        ("Skipped: no text of the guide in ../shared/seeds", "a requirement document"),
        ("Skipped: the case: four processes on two cores: once, in fp32", "nothing"),
        ("Skipped: a reason that nobody has thought of", "something that has no group"),
    ],
)
def test_a_reason_names_what_is_missing(reason: str, group: str) -> None:
    assert skipped.group_of(reason).startswith(group)


def test_the_largest_group_comes_first_and_what_lacks_nothing_last() -> None:
    reasons = ["the case: refused there"] * 3 + ["needs an NPU"] + ["no tree of x"] * 2
    lines = skipped.summary(reasons)
    assert [line.split()[0] for line in lines] == ["2", "1", "3"]
    assert lines[-1].endswith(skipped.CASE)


def test_nothing_skipped_says_nothing() -> None:
    assert skipped.summary([]) == []


def reasons_in(path: Path) -> Iterator[str]:
    """Yield the reasons to skip that a file of tests has in words; others are made as it runs."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("skip", "skipif", "importorskip"):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            for value in given + (node.args[:1] if name == "skip" else []):
                if isinstance(value, ast.Constant | ast.JoinedStr):
                    yield ast.unparse(value).lstrip("f").strip("'\"")


def test_every_reason_has_a_group() -> None:
    found = {reason for path in (ROOT / "tests").rglob("*.py") for reason in reasons_in(path)}
    assert len(found) > 80
    assert [reason for reason in sorted(found) if skipped.group_of(reason) == skipped.UNKNOWN] == []
