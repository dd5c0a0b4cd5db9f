"""What ``megatron-npu`` answers where no command is run."""

from __future__ import annotations

import pytest

from megatron_npu.commands.cli import main


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ([], 2, "pre-train a GPT"),
        (["help"], 0, "pre-train a GPT"),
        (["--help"], 0, "pre-train a GPT"),
        (["--version"], 0, "megatron_npu "),
        (["pretrian"], 2, "pretrain"),
    ],
    ids=["nothing", "help", "--help", "--version", "a typing error"],
)
def test_without_a_command_it_says_what_there_is(argv, code, said, capfd):
    assert main(argv) == code
    assert said in "".join(capfd.readouterr())
