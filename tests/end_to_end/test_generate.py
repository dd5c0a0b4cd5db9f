"""Text from a checkpoint of the driver: of a prompt, from nothing, of a file, in a conversation."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from megatron_npu.commands import cli
from megatron_npu.generation import conversation
from megatron_npu.generation.generate import generate
from tests.support import tiny

pytest.importorskip("megatron.core")
KINDS = {
    "gpt2": [],
    "llama": "--position-embedding-type rope --swiglu --normalization RMSNorm".split(),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def trained(request, dataset, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("trained") / "checkpoint"
    line = ["pretrain", *tiny.flags_for(dataset), "--train-iters", "20", "--eval-iters", "0", "--no-plot"]
    done = tiny.run(*line, "--save", str(folder), *request.param)
    assert done.returncode == 0, done.stderr
    return str(folder)


@pytest.fixture
def run(trained, monkeypatch, capsys):
    """Return a function: flags of generate -> what it prints."""
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")

    def printed(*flags: object, typed: str | None = None) -> str:
        if typed is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        capsys.readouterr()
        assert cli.main(["generate", "--load", trained, *map(str, flags)]) == 0
        return capsys.readouterr().out

    return printed


def records(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_greedy_text_is_the_same_each_time_and_other_text_by_its_seed(trained):
    greedy = [generate(trained, "1 2 3", num_tokens=20, temperature=0) for _ in range(2)]
    assert greedy[0] == greedy[1] == generate(trained, "1 2 3", num_tokens=20, top_k=1, seed=9)
    assert greedy[0].startswith("1 2 3 ")
    one, same, other = (generate(trained, "1 2 3", num_tokens=20, seed=seed) for seed in (1, 1, 2))
    assert one == same != other


def test_a_prompt(run, tmp_path):
    line = ["--prompt", "4 5", "--num-tokens", 3, "--greedy"]
    printed = run(*line)
    assert printed.startswith("4 5 ")
    assert run(*line, "--output", tmp_path / "text") == ""
    assert (tmp_path / "text").read_text() == printed
    assert len(run("--prompt", "4 5", "--temperature", 0).split()) <= 32, "by default what fits"
    assert run(*line, "--bf16").startswith("4 5 ")
    several = run("--prompt", "4 5", "--num-samples", 2, "--num-tokens", 3).splitlines()
    assert several[::2] == ["----- 1 of 2 -----", "----- 2 of 2 -----"]
    assert several[1] != several[3]


def test_samples_from_nothing_as_megatron_spells_them(run, tmp_path):
    file = tmp_path / "unconditional_samples.json"
    line = ["--num-samples", 3, "--top_p", 0.9, "--temperature", 1.0, "--out-seq-length", 20]
    assert run(*line, "--genfile", file) == f"3 samples in {file}\n"
    found = records(file)
    assert len({row["text"] for row in found}) == 3
    for row in found:
        assert row.keys() == {"text", "length", "finished"}
        assert len(row["text"].split()) == row["length"]
        assert row["finished"] == (row["length"] < 19)
        assert "255" not in row["text"].split(), "no end token"
    others = tmp_path / "others.json"
    line = ["--num-samples", 3, "--top-p", 0.9, "--out-seq-length", 20]
    run(*line, "--recompute", "--micro-batch-size", 2, "--genfile", others)
    assert others.read_text() == file.read_text()


def test_the_script_that_older_trees_have(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    file = str(tmp_path / "samples.json")
    line = ["run", "tools/generate_samples_gpt.py", *"--tensor-model-parallel-size 1 --num-layers 2".split()]
    line += [*"--hidden-size 32 --load".split(), trained, *"--num-attention-heads 4 --fp16".split()]
    line += "--max-position-embeddings 32 --tokenizer-type NullTokenizer --micro-batch-size 2".split()
    line += "--seq-length 32 --out-seq-length 32 --temperature 1.0 --num-samples 2 --top_p 0.9".split()
    assert cli.main([*line, "--recompute", "--genfile", file]) == 0
    assert (
        "tools/generate_samples_gpt.py does not exist here; running `megatron-npu generate`"
        in capsys.readouterr().err
    )
    assert len(records(Path(file))) == 2


def test_a_file_of_prompts(run, tmp_path):
    (tmp_path / "prompts").write_text("1 2 3\n7\n9 8 7 6 5\n")
    line = ["--sample-input-file", tmp_path / "prompts", "--num-tokens", 4, "--greedy"]
    assert run(*line) == f"3 samples in {tmp_path}/prompts.out\n"
    found = records(tmp_path / "prompts.out")
    assert [row["prompt"] for row in found] == ["1 2 3", "7", "9 8 7 6 5"]
    assert [row["text"] + "\n" for row in found] == [
        run("--prompt", row["prompt"], "--num-tokens", 4, "--greedy") for row in found
    ]
    run(*line, "--sample-output-file", tmp_path / "there", "--num-samples", 2)
    twice = [row["prompt"] for row in found for _ in range(2)]
    assert [row["prompt"] for row in records(tmp_path / "there")] == twice


def test_a_conversation_goes_on_after_prompts_that_do_not_fit(run, monkeypatch):
    loads = []
    original = conversation.talk
    monkeypatch.setattr(conversation, "talk", lambda *args: (loads.append(1), original(*args)))
    typed = ["1 2", "", "word", "\udcff", " ".join(["1"] * 40), "1 2", "stop", "3 4"]
    printed = run("--num-samples", 0, "--greedy", "--num-tokens", 5, typed="\n".join(typed) + "\n")
    answers = printed.split(conversation.QUESTION)[1:]
    text = run("--prompt", "1 2", "--greedy", "--num-tokens", 5)
    assert answers[0] == answers[5] == text
    assert "the prompt is empty" in answers[1]
    assert "without a prompt" in answers[1]
    assert "the text must consist of numbers from 0 to" in answers[2]
    assert "the text must consist of numbers from 0 to" in answers[3]
    assert "the prompt has 40 tokens, but it must have at most 31" in answers[4]
    assert answers[6:] == [""], "stop ends it"
    assert loads == [1]
    assert conversation.QUESTION == "Context prompt (stop to exit) >>> "
    assert run("--num-samples", 0, typed="") == conversation.QUESTION + "\n", "so does the end of the input"


@pytest.mark.parametrize("sizes", ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"])
def test_two_processes_draw_the_same_text(run, trained, tmp_path, sizes):
    line = ["--num-samples", "2", "--out-seq-length", "12", "--genfile"]
    run(*line, tmp_path / "one")
    done = tiny.run(*("generate", "--load", trained, sizes, "2", *line, str(tmp_path / "two")), processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "two").read_text() == (tmp_path / "one").read_text()
