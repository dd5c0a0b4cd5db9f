"""Numbers in texts from outside: Python raises an error for those with over 4300 digits."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_npu.base import arg_parser, digits
from megatron_npu.base.arg_parser import Unfit
from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization.null import NullTokenizer
from megatron_npu.finetune.run import ranks
from megatron_npu.options import hccl_buffers
from megatron_npu.planning.job import Job
from megatron_npu.pretrain.checkpoint import checkpoint_description, checkpoint_files
from megatron_npu.pretrain.flags import expert_flags
from megatron_npu.process import launchers, visible_devices
from megatron_npu.web import address

LONG = "9" * 5000


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), ("٣", 3), ("9" * 18, 10**18 - 1)]
    + [(text, None) for text in ("", "-1", "1.0", "1_0", "²", " 1", "9" * 19, LONG)],
)
def test_what_is_a_number(text: str, number: int | None) -> None:
    assert digits.number(text) == number


def test_every_reader_of_a_number_says_what_it_expected(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / checkpoint_files.TRACKER).write_text(LONG)
    monkeypatch.setenv("NUMBER", LONG)
    for error, read in {
        "must consist of numbers": lambda: NullTokenizer(9).encode(f"1 {LONG}"),
        "must contain an iteration number": lambda: checkpoint_files.newest(tmp_path),
        "must be a non-negative integer": lambda: ranks.from_environment("NUMBER", 0),
        "must be an integer": lambda: launchers._number("NUMBER", 0),
    }.items():
        with pytest.raises(UsageError, match=error):
            read()
    for parse in (address.address, arg_parser.byte_size, expert_flags.layer_frequency):
        with pytest.raises(Unfit):
            parse(LONG)
    assert Job(1, ("pretrain",), ("--layers", LONG)).number("--layers", 3) == 3
    with pytest.raises(ValueError, match="must be a version number"):
        checkpoint_description.require_known_format(tmp_path, {checkpoint_description.FORMAT: f"1.{LONG}"})
    monkeypatch.setenv("HCCL_BUFFSIZE", LONG)
    assert hccl_buffers.default() == hccl_buffers.DEFAULT
    monkeypatch.setenv(visible_devices.ASCEND, f"0,{LONG}")
    assert visible_devices.listed(visible_devices.ASCEND) == [0]
