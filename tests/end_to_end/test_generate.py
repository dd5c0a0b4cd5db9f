"""Text from a checkpoint of the driver."""

from __future__ import annotations

import pytest

from megatron_npu import cli
from megatron_npu.evaluation.generate import generate

pytest.importorskip("megatron.core")


@pytest.fixture(params=[[], "--position-embedding-type rope --swiglu --normalization RMSNorm --bf16".split()])
def trained(request, train, tmp_path):
    train("--save", tmp_path / "t", "--train-iters", 20, "--eval-iters", 0, *request.param)
    return tmp_path / "t"


def test_greedy_text_is_the_same_each_time_and_other_text_by_its_seed(trained):
    greedy = [generate(str(trained), "1 2 3", num_tokens=20, temperature=0) for _ in range(2)]
    assert greedy[0] == greedy[1] == generate(str(trained), "1 2 3", num_tokens=20, top_k=1, seed=9)
    assert greedy[0].startswith("1 2 3 ")
    one, same, other = (generate(str(trained), "1 2 3", num_tokens=20, seed=seed) for seed in (1, 1, 2))
    assert one == same != other


def test_the_command_writes_a_file(trained, tmp_path, capsys):
    line = ["generate", "--load", str(trained), "--prompt", "4 5", "--num-tokens", "3", "--temperature", "0"]
    assert cli.main(line) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    assert cli.main([*line, "--output", str(tmp_path / "text")]) == 0
    assert (tmp_path / "text").read_text() == printed + "\n"
