"""LAMBADA of a checkpoint of the driver: the figures are those that its own greedy text gives."""

from __future__ import annotations

import json

import pytest

from megatron_npu import cli
from megatron_npu.evaluation.generate import generate
from megatron_npu.evaluation.lambada import accuracy

pytest.importorskip("megatron.core")
PASSAGES = ["1 2 3 4", "10 12 14 16 18", "7 7 7", "20 21 22 23 24 25", "5 9", "100 103 106 109"]


@pytest.fixture
def trained(train, tmp_path):
    train("--save", tmp_path / "t", "--train-iters", 60, "--eval-iters", 0)
    return tmp_path / "t"


@pytest.fixture
def passages(tmp_path):
    file = tmp_path / "passages.json"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    return file


def test_figures_are_those_of_greedy_text(trained, passages, tmp_path, capsys):
    """Each passage by itself, with a cache of keys and values, against batches without one."""
    known = []
    for text in PASSAGES:
        context = text.rpartition(" ")[0]
        if generate(str(trained), context, num_tokens=1, temperature=0) == text:
            known.append(text)
    # passages that the model surely completes, so that something is counted
    continued = [generate(str(trained), text, num_tokens=1, temperature=0) for text in PASSAGES]
    lines = [*PASSAGES, *continued]
    passages.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    expected = (len(known) + len(PASSAGES), len(lines))
    for batch in (1, 5):
        for strict in (True, False):  # a number is one token
            assert accuracy(str(trained), str(passages), strict=strict, batch=batch) == expected
    command = ["lambada", "--load", str(trained), "--valid-data", str(passages), "--strict-lambada"]
    assert cli.main(command) == 0
    assert f"number correct: {expected[0]:.4E} | total examples: {expected[1]:.4E}" in capsys.readouterr().out


BAD = {
    "": "no passages",
    "{}\n": "line 1",
    '{"text": "1 2"}\n{"text": "7"}\n': "line 2",
    '{"text": ""}\n': "line 1",
    json.dumps({"text": " ".join(["1"] * 40)}) + "\n": "a passage of 39 tokens",
}


def test_bad_passages(trained, tmp_path, refused):
    file = tmp_path / "bad.json"
    for content, said in BAD.items():
        file.write_text(content)
        assert said in refused("lambada", "--load", trained, "--valid-data", file)


def test_no_passages_and_no_checkpoint(tmp_path, refused):
    assert "no checkpoint" in refused("lambada", "--load", tmp_path, "--valid-data", tmp_path / "x")
