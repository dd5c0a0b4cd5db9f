"""The guide's scripts: they train, evaluate what they have trained, and refuse in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.tiny import ROOT
from tests.hosts.megatron_lm import runs

SCRIPTS = ROOT / "tests_gpt"
OPTIONS = ["--pre=16", "--next=0", "--shape_order=BSH"]


@pytest.fixture
def script(data, tmp_path):
    """Return a function: name of a script, options, changes to the environment -> the finished process."""

    def run(name: str, *options: str, **changes: object) -> subprocess.CompletedProcess[str]:
        own = {
            "PYTHON": sys.executable,
            "DATA_PATH": data / "text",
            "VOCAB_FILE": data / "vocab.json",
            "MERGE_FILE": data / "merges.txt",
            "CHECKPOINT_PATH": tmp_path / "checkpoint",
            "SEQ_LENGTH": 64,
            "TRAIN_ITERS": 4,
            "NUM_HEADS": 2,
        }
        settings = {name: str(value) for name, value in {**own, **changes}.items()}
        return subprocess.run(
            ["bash", str(SCRIPTS / name), *options],
            env=runs.environment(**settings),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


def test_trains_and_evaluates(checkout, script, tmp_path):
    """A sliding window in BSH: 4 iterations, a checkpoint, and LAMBADA from it on as many processes."""
    layout = {"MEGATRON_LM_PATH": checkout, "NPUS_PER_NODE": 2, "TP": 2}
    output = runs.succeeded(script("pretrain_gpt_distributed_bf16.sh", *OPTIONS, **layout))
    assert "Small preset on 2 x cpu" in output
    assert "megatron_lm 285068c8" in output
    assert sorted(runs.losses(output)) == [1, 2, 3, 4]
    lambada = tmp_path / "lambada.json"
    lambada.write_text("".join(json.dumps({"text": f"a b c d {n} e f"}) + "\n" for n in range(5)))
    output = runs.succeeded(script("test_gpt_distributed_bf16.sh", *OPTIONS, **layout, LAMBADA_FILE=lambada))
    assert "total examples: 5.0000E+00 | avg accuracy: " in output


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("pretrain_gpt_distributed.sh", ["--fast"], "no option --fast"),
        ("pretrain_gpt_distributed_fp16.sh", [], "--pre= is not a number of tokens"),
        (
            "pretrain_gpt_distributed_fp16.sh",
            ["--pre=2k", *OPTIONS[1:]],
            "--pre=2k is not a number of tokens",
        ),
        ("pretrain_gpt_distributed_bf16.sh", [*OPTIONS[:2], "--shape_order=HBS"], "expected SBH or BSH"),
        ("test_gpt_distributed_fp16.sh", [*OPTIONS, "--more"], "no option --more"),
        ("test_gpt_distributed_sample.sh", ["1"], "no option 1"),
    ],
)
def test_bad_options(script, name, options, said):
    refused(script(name, *options), said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"MEGATRON_LM_PATH": "/nowhere"}, "MEGATRON_LM_PATH=/nowhere has no pretrain_gpt.py"),
        ({"DATA_PATH": "/nowhere/text"}, "no file /nowhere/text.idx; set DATA_PATH"),
        ({"VOCAB_FILE": "/nowhere.json"}, "no file /nowhere.json; set VOCAB_FILE"),
        ({"NPUS_PER_NODE": "two"}, "NPUS_PER_NODE=two is not a number of processes"),
        ({"PRESET": "huge"}, "PRESET=huge; expected full or small"),
    ],
)
def test_bad_settings(script, changes, said):
    refused(script("pretrain_gpt_distributed.sh", **changes), said)


def refused(result: subprocess.CompletedProcess[str], said: str) -> None:
    """Check that a script has ended with exit code 2 and one line that says why."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_every_script_of_the_guide_is_there():
    kinds = [
        f"{task}_gpt_distributed{kind}.sh" for task in ("pretrain", "test") for kind in ("", "_fp16", "_bf16")
    ]
    for name in [*kinds, "test_gpt_distributed_sample.sh", "env_npu.sh"]:
        assert Path(SCRIPTS, name).stat().st_mode & 0o100, name
