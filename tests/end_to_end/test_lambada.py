"""LAMBADA of a checkpoint of the driver: the figures are those that its own greedy text gives."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_npu.commands import cli
from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from megatron_npu.evaluation.lambada import accuracy
from megatron_npu.evaluation.passages import CUTS
from megatron_npu.generation.generate import generate
from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.run import pretrain
from tests.conftest import ROOT
from tests.support import tiny

pytest.importorskip("megatron.core")
PASSAGES = ["1 2 3 4", "10 12 14 16 18", "7 7 7", "20 21 22 23 24 25", "5 9", "100 103 106 109"]


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_NPU_DEVICE", "cpu")
        yield


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """A checkpoint that tests only read."""
    place = tmp_path_factory.mktemp("trained") / "t"
    changes = ["--save", str(place), "--train-iters", "60", "--eval-iters", "0"]
    pretrain.train(arguments.parse([*tiny.flags_for(dataset), *changes]))
    return place


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
    results = tmp_path / "results"
    assert cli.main([*command, "--results", str(results)]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert f"number correct: {expected[0]:.4E} | total examples: {expected[1]:.4E}" in first
    told = [json.loads(line) for line in results.read_text().splitlines()]
    assert results.stat().st_mode & 0o777 == 0o640
    assert [row["line"] for row in told] == [*range(1, len(lines) + 1)]
    assert sum(row["correct"] for row in told) == expected[0]
    assert [row["answer"] for row in told] == [[int(text.split()[-1])] for text in lines]
    assert [row["context_tokens"] for row in told] == [len(text.split()) - 1 for text in lines]
    mean = sum(row["log_likelihood"] for row in told) / len(told)
    assert second == f" validation results on LAMBADA | perplexity: {math.exp(-mean):.4E}"
    likeliest = [row["log_likelihood"] for row in told if row["correct"]]
    assert min(likeliest) > -math.log(256), "more than one of 256 tokens that are alike"


def test_what_lm_eval_cuts_otherwise(gpt2_vocab):
    """It cuts at blanks alone, and takes the ids of the last word from those of the whole passage."""
    tokenizer = GPT2Tokenizer(*gpt2_vocab)
    texts = ["One two three", "one  two", "one\ntwo three\nfour", 'a "b c', "ends in a blank "]
    for text, word in zip(texts, (" three", "  two", " three\nfour", " c", " "), strict=True):
        example = CUTS["lm-eval"](text, tokenizer)
        assert tokenizer.decode(example.answer) == word
        assert tokenizer.decode([*example.context, *example.answer]) == text
    file = ROOT.parent / "shared" / "data" / "lambada_test.jsonl"
    if not file.is_file():
        pytest.skip("no lambada_test.jsonl in ../shared/data")
    lines = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    suspicious = [line for line in lines if line.split() != line.split(" ")]
    differing = [
        line for line in suspicious if CUTS["lm-eval"](line, tokenizer) != CUTS["word"](line, tokenizer)
    ]
    assert (len(lines), len(differing)) == (5153, 7)


def test_two_ways_to_cut_are_refused(tmp_path, refused):
    told = refused("lambada", "--load", tmp_path, "--valid-data", "x", "--strict-lambada", "--lm-eval-cut")
    assert "--strict-lambada and --lm-eval-cut" in told


def write(file: Path, *texts: str) -> str:
    """Write passages; return the path as text."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


def test_of_a_long_passage_the_end_is_read(trained, tmp_path, capsys):
    """The model has 32 positions; the last word is asked for, not read."""
    end = [" ".join(map(str, range(start, start + 33))) for start in range(20, 120, 5)]
    figures = accuracy(str(trained), write(tmp_path / "ends", *end), strict=False)
    assert capsys.readouterr().out == ""
    longer = ["9 8 7 " + text for text in end]
    assert accuracy(str(trained), write(tmp_path / "longer", *longer), strict=False) == figures
    told = " > 20 passages are longer than 32 tokens; only their last 32 tokens are used"
    assert told in capsys.readouterr().out
    assert 0 < figures[0] < figures[1], "or all ends would be as good"


def test_a_line_ends_where_json_ends_it(trained, tmp_path, capsys):
    """U+2028, U+0085 and their like stand inside of texts; Python's splitlines cuts there."""
    row = {"text": PASSAGES[0], "title": "one\u2028two\u0085three\x1cfour"}
    (tmp_path / "odd").write_text((json.dumps(row, ensure_ascii=False) + "\n") * 3, encoding="utf-8")
    assert cli.main(["lambada", "--load", str(trained), "--valid-data", str(tmp_path / "odd")]) == 0
    assert "total examples: 3.0000E+00" in capsys.readouterr().out


def test_processes_share_the_passages(trained, tmp_path):
    """Each counts once, although two processes cannot share seven out evenly."""
    known = generate(str(trained), PASSAGES[0], num_tokens=1, temperature=0)
    file = write(tmp_path / "passages", *[known] * 7)
    done = tiny.run("lambada", "--load", str(trained), "--valid-data", file, "--strict-lambada", processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("number correct: 7.0000E+00 | total examples: 7.0000E+00") == 1


BAD = {
    "": "no passages",
    "{}\n": "line 1",
    '{"text": "1 2"}\n{"text": "7"}\n': "line 2",
    '{"text": ""}\n': "line 1",
    json.dumps({"text": " 5"}) + "\n": "the passage has 0 tokens, and its last word 1",
}


def test_bad_passages(trained, tmp_path, refused):
    file = tmp_path / "bad.json"
    for content, said in BAD.items():
        file.write_text(content)
        assert said in refused("lambada", "--load", trained, "--valid-data", file)


def test_no_passages_and_no_checkpoint(tmp_path, refused):
    assert "no checkpoint" in refused("lambada", "--load", tmp_path, "--valid-data", tmp_path / "x")
