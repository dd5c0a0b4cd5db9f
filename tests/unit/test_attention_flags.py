"""The flags of the fused attention: both spellings, and their values as one object."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_npu.base.arg_parser import Parser
from megatron_npu.options.attention_flags import AttentionFlags, add_attention_flags


def parse(*flags: str) -> AttentionFlags:
    parser = Parser("check")
    add_attention_flags(parser)
    return AttentionFlags.from_args(parser.parse_args(list(flags)))


def test_without_flags_the_values_are_the_defaults():
    assert parse() == AttentionFlags(pre_tokens=None, next_tokens=None, shape_order="SBH")


@pytest.mark.parametrize("spelling", ["tockens", "tokens"])
def test_both_spellings_set_the_window(spelling):
    given = parse(f"--pre-{spelling}=2048", f"--next-{spelling}=0", "--shape-order=BSH")
    assert given == AttentionFlags(2048, 0, "BSH")


def test_the_values_stay_what_they_are():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttentionFlags().pre_tokens = 3
