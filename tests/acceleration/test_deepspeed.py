"""``--deepspeed-config``: the losses of plain torch at every stage, resumption, and files that cannot be."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_npu import checksums, cli
from megatron_npu.acceleration import arguments, deepspeed_config, deepspeed_engine, ranks
from megatron_npu.errors import UsageError
from tests.acceleration import deepspeed_stacks, runs, training
from tests.conftest import LONGEST, ROOT
from tests.payload import Runs

SCRIPT = Path(__file__).parent / "scripts" / "dropout.py"
SAVED, LAST = 8, 12

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed"
)


@functools.cache
def plain(kind: str, lora_rank: int) -> list[float]:
    """Return the losses of plain torch in this process, made once."""
    return training.plain(kind, deepspeed_stacks.STEPS, lora_rank)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Name of a run of deepspeed_stacks.py -> what two ranks made of it."""
    folder = tmp_path_factory.mktemp("deepspeed")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "MEGATRON_NPU_DEVICE": "cpu",
    }
    environment["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    program = str(Path(deepspeed_stacks.__file__))
    done = subprocess.run(
        [sys.executable, program, str(folder), "cpu", "2"],
        env=environment,
        timeout=LONGEST,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert not (folder / "extensions").exists()  # nothing was compiled
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    return found[0]


def check(losses, kind, file, flags):
    assert isinstance(losses, list), losses
    tolerance = 1e-2 if "bf16" in file else 1e-5
    expected = plain(kind, 4 if "--lora-rank" in flags else 0)
    assert expected[0] - expected[-2] > 3e-3 * expected[0]  # it learns, gradients matter
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0)


@needs_deepspeed
@pytest.mark.parametrize("row", deepspeed_stacks.RUNS, ids=lambda row: deepspeed_stacks.title(*row))
def test_two_ranks_train_like_plain_torch(two_ranks, row):
    check(two_ranks[deepspeed_stacks.title(*row)], *row)


@needs_deepspeed
@pytest.mark.parametrize("row", deepspeed_stacks.RESUMED, ids=lambda row: deepspeed_stacks.title(*row))
def test_two_ranks_go_on_from_the_engines_files_to_the_bit(two_ranks, row):
    losses = two_ranks[f"resumed {deepspeed_stacks.title(*row)}"]
    check(losses, *row)
    assert losses == two_ranks[f"whole {deepspeed_stacks.title(*row)}"]


def written(folder: Path, **values: object) -> Path:
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(values))
    return path


def flags(save: Path, *more: object) -> list[str]:
    every = (
        *("--user-script", SCRIPT, "--epochs", 2, "--micro-batch-size", 4, "--global-batch-size", 8),
        *("--lr", "1e-2", "--log-interval", 1, "--save", save, "--no-plot", *more),
    )
    return [str(word) for word in every]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Where a run of one process with DeepSpeed, which nothing interrupted, has saved."""
    folder = tmp_path_factory.mktemp("saved")
    file = written(folder, zero_optimization={"stage": 2}, train_batch_size="auto", gradient_clipping=1.0)
    done = runs.train(*flags(folder, "--save-interval", SAVED, "--deepspeed-config", file))
    assert done.returncode == 0, done.stderr
    assert "ZeRO 2 over 1 rank, fp32, AdamW" in done.stdout
    return folder


def begun(saved: Path, folder: Path) -> Path:
    """Return a folder as it is where the run was killed after its first checkpoint."""
    shutil.copytree(saved / f"iter_{SAVED:07d}", folder / f"iter_{SAVED:07d}")
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{SAVED}\n")
    return folder


@needs_deepspeed
def test_it_trains_like_torch_and_goes_on_to_the_bit(saved, tmp_path):
    assert cli.main(["train", *flags(tmp_path / "plain"), "--nproc-per-node", "1"]) == 0
    expected = runs.losses(tmp_path / "plain")
    torch.testing.assert_close(runs.losses(saved), expected, rtol=1e-5, atol=0)
    folder = begun(saved, tmp_path / "begun")
    done = runs.train(*flags(folder, "--load", folder, "--deepspeed", saved / "deepspeed.json"))
    assert done.returncode == 0, done.stderr
    assert runs.losses(folder) == runs.losses(saved)[SAVED:]
    weights = [place / "model" / "model.safetensors" for place in (saved, folder)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert runs.evaluations(folder)[LAST]["loss"] == runs.evaluations(saved)[LAST]["loss"]


@needs_deepspeed
def test_a_checkpoint_of_another_engine_is_refused(saved, tmp_path, capsys):
    folder = begun(saved, tmp_path / "begun")
    assert cli.main(["train", *flags(tmp_path / "new", "--load", folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "was saved by DeepSpeed with zero_optimization.stage 2, precision fp32, ranks 1" in line
    assert "this run has torch, without DeepSpeed" in line


@needs_deepspeed
def test_a_file_that_would_run_something_is_not_read(saved, tmp_path):
    folder = begun(saved, tmp_path / "begun")
    place = folder / f"iter_{SAVED:07d}"
    (place / "checksums.json").unlink()
    hostile = next((place / "deepspeed" / "engine").glob("*optim_states.pt"))
    torch.save(Runs(tmp_path / "mark"), hostile)
    done = runs.train(*flags(tmp_path / "new", "--load", folder, "--deepspeed", saved / "deepspeed.json"))
    assert done.returncode == 2, done.stderr
    assert "it names posix.mkdir" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "mark").exists()


def test_what_deepspeed_reads_without_its_checkpoint_engine_runs_nothing(tmp_path):
    """As readers of its optimizers do; the environment has the last word in torch.load."""
    torch.save(Runs(tmp_path / "mark"), tmp_path / "file")

    def load_checkpoint(folder: str, tag: str) -> None:
        torch.load(tmp_path / "file", weights_only=False)

    engine = SimpleNamespace(checkpoint_engine=SimpleNamespace(), load_checkpoint=load_checkpoint)
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
        deepspeed_engine.DeepSpeedPrepared.load_beside(SimpleNamespace(engine=engine), tmp_path)
    assert not (tmp_path / "mark").exists()


@needs_deepspeed
def test_damage_in_the_engines_files_is_found(saved, tmp_path):
    """Flipped in the middle: DeepSpeed itself goes on with other numbers."""
    folder = begun(saved, tmp_path / "begun")
    place = folder / f"iter_{SAVED:07d}"
    file = max((place / "deepspeed").rglob("*optim_states.pt"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert checksums.damaged(place) == [f"{file.relative_to(place)} has other content than was saved"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("[]", "it holds a list; expected a JSON object"),
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage 4; expected 0, 1, 2 or 3"),
        ('{"zero_optimization": 2}', "zero_optimization 2; expected an object"),
        ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "bf16 and fp16; expected one of them"),
        ('{"amp": {"enabled": true}}', '"amp"; expected a file without it'),
        (
            '{"checkpoint": {"load_universal": true}}',
            '"checkpoint.load_universal"; expected a file without it',
        ),
        ('{"checkpoint": {"writer": {"decoupled": true}}}', '"checkpoint.writer"; expected'),
        ('{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}', "offload_optimizer.device nvme"),
    ],
)
def test_a_file_that_cannot_be_is_told_before_anything_is_loaded(text, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: name)  # deepspeed is not needed for it
    path = tmp_path / "deepspeed.json"
    path.write_text(text)
    assert cli.main(["train", *flags(tmp_path / "save", "--deepspeed-config", path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--deepspeed-config {path}: " in line
    assert said in line


def parsed(*more: object):
    args = arguments.parse(flags(Path("save"), *more))
    arguments.set_ranks(args, ranks.Ranks(world_size=2))
    return args


def test_the_word_is_that_of_deepspeed_and_of_transformers():
    for line in (
        "--deepspeed ds.json",
        "--deepspeed --deepspeed_config ds.json",
        "--deepspeed-config ds.json",
    ):
        assert parsed(*line.split()).deepspeed_config == Path("ds.json")
    with pytest.raises(UsageError, match="--deepspeed without a file; expected --deepspeed-config FILE"):
        deepspeed_config.read(parsed("--deepspeed").deepspeed_config)


@needs_deepspeed
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"train_batch_size": 16}, "train_batch_size 16, and --global-batch-size 8"),
        ({"train_micro_batch_size_per_gpu": 2}, "per_gpu 2, and --micro-batch-size 4"),
        ({"gradient_clipping": 0.5}, "gradient_clipping 0.5, and --clip-grad 1.0"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1.0}}}, "optimizer.params.lr 1.0, and --lr 0.01"),
        ({"fp16": {"enabled": True}}, "fp16.enabled, and --mixed-precision bf16"),
    ],
)
def test_values_that_contradict_a_flag(values, said, tmp_path):
    precision = ("--mixed-precision", "bf16") if "fp16" in values else ()
    with pytest.raises(UsageError) as error:
        deepspeed_config.filled(written(tmp_path, **values), parsed(*precision))
    assert said in error.value.given, error.value.given


@needs_deepspeed
def test_auto_values_are_those_of_the_flags(tmp_path):
    adam = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    warm = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}
    args = parsed("--lr-warmup-iters", 3, "--train-iters", 9)
    file = written(tmp_path, optimizer=adam, scheduler=warm, bf16={"enabled": "auto"})
    args.deepspeed_config = file
    found = deepspeed_config.finished(deepspeed_config.filled(file, args), args, None)
    assert (found["train_batch_size"], found["gradient_accumulation_steps"]) == (8, 1)
    assert (found["gradient_clipping"], found["bf16"]) == (1.0, {"enabled": False})
    assert found["optimizer"]["params"] == {
        "lr": 0.01,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.01,
    }
    assert found["scheduler"]["params"] == {"warmup_num_steps": 3, "warmup_max_lr": 0.01}
    args.deepspeed_config = file = written(tmp_path, aio={"block_size": "auto"})
    with pytest.raises(UsageError, match=r'aio\.block_size "auto"'):
        deepspeed_config.finished(deepspeed_config.filled(file, args), args, None)
