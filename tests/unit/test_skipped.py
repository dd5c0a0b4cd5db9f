"""The groups of skipped tests that the end of ``make test`` tells."""

from __future__ import annotations

import pytest

from tests import skipped


@pytest.mark.parametrize(
    ("reason", "group"),
    [
        ("Skipped: no tree of megatron_core 0.13.1: run `bash scripts/get_megatron.sh`", "a Megatron tree"),
        ("Skipped: no checkouts/megatron_core-0.12.1: run scripts/get_megatron.sh", "a Megatron tree"),
        ("no C++ compiler: the simulated Ascend cannot be built", "the simulated Ascend"),
        ("no torch_npu wheel for the simulated Ascend: no network", "the simulated Ascend"),
        ("Skipped: could not import 'transformers': No module named 'transformers'", "a package"),
        ("Skipped: no gpt2-vocab.json and gpt2-merges.txt in ../shared/data", "data"),
        ("Skipped: needs an NPU", "an NPU"),
        ("Skipped: four processes on two cores: once, in fp32", "nothing"),
    ],
)
def test_a_reason_names_what_is_missing(reason: str, group: str) -> None:
    assert skipped.group_of(reason).startswith(group)


def test_the_largest_group_comes_first_and_what_lacks_nothing_last() -> None:
    reasons = ["refused there"] * 3 + ["needs an NPU"] + ["no tree of x"] * 2
    lines = skipped.summary(reasons)
    assert [line.split()[0] for line in lines] == ["2", "1", "3"]
    assert lines[-1].endswith(skipped.CASE)


def test_nothing_skipped_says_nothing() -> None:
    assert skipped.summary([]) == []
