"""Files from a stranger: each reader refuses what would run, in one line, and nothing runs.

The payload makes a folder: ``os.mkdir``, in a pickle wherever a checkpoint or a cache of indices has one.
"""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_npu.checkpoint_files import checksums
from megatron_npu.commands import cli
from tests.conftest import checkout
from tests.support import stock_core, tiny
from tests.support.payload import Runs

pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, dataset) -> Path:
    """A checkpoint of the driver, with states of random generators."""
    folder = tmp_path_factory.mktemp("trained")
    line = [*tiny.flags_for(dataset), *f"--train-iters 1 --eval-iters 0 --no-plot --save {folder}".split()]
    done = tiny.run("pretrain", *line)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def saved(trained, tmp_path) -> Path:
    """The place of a copy of it that may be changed: a stranger has no checksums, or right ones."""
    place = Path(shutil.copytree(trained, tmp_path / "saved")) / "iter_0000001"
    (place / checksums.NAME).unlink()
    return place


def in_metadata(saved: Path, mark: Path) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(Runs(mark)))


def in_common(saved: Path, mark: Path) -> None:
    torch.save({"args": Runs(mark)}, saved / "common.pt")


def in_values(saved: Path, mark: Path) -> None:
    """Put the payload behind the shards, and let the random states be there."""
    with open(saved / ".metadata", "rb") as stream:
        metadata = pickle.load(stream)
    content = io.BytesIO()
    torch.save([Runs(mark)], content)
    changed = 0
    for index, place in metadata.storage_data.items():
        if index.fqn.startswith("rng_state"):
            file = saved / place.relative_path
            place.offset, place.length = file.stat().st_size, content.getbuffer().nbytes
            with open(file, "ab") as stream:
                stream.write(content.getbuffer())
            changed += 1
    assert changed
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("put", [in_metadata, in_common, in_values])
def test_pretrain_runs_nothing(put, saved, tmp_path, flags, refused):
    put(saved, tmp_path / "mark")
    line = flags("--train-iters", 2, "--load", saved.parent, "--no-plot", "--eval-iters", 0)
    assert " refers to posix.mkdir" in refused("pretrain", *line)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("put", [in_metadata, in_common])
def test_what_reads_a_trained_model_runs_nothing(put, saved, tmp_path, refused, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    put(saved, tmp_path / "mark")
    (tmp_path / "passages").write_text('{"text": "1 2 3"}\n')
    for line in (
        ["lambada", "--load", saved.parent, "--valid-data", tmp_path / "passages"],
        ["serve", "--load", saved.parent, "--port", "0"],
        ["generate", "--load", saved.parent, "--prompt", "1 2"],
        ["convert", "--from", "megatron", "--to", "hf", saved.parent, tmp_path / "hf"],
    ):
        assert " refers to posix.mkdir" in refused(*line)
        assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps(None), pickle.dumps({"a": 1})])
def test_a_broken_metadata_is_told_in_one_line(content, saved, flags, refused, caplog):
    (saved / ".metadata").write_bytes(content)
    line = flags("--train-iters", 2, "--load", saved.parent, "--no-plot", "--eval-iters", 0)
    assert "cannot be read: " in refused("pretrain", *line)
    assert ".metadata is invalid" in refused("generate", "--load", saved.parent, "--prompt", "1 2")
    assert "Traceback" not in caplog.text


def of_another_kind(saved: Path, name: str, content: object) -> None:
    """Put a value in the place of one of ``common.pt``, or a text in that of ``metadata.json``."""
    if name == "metadata.json":
        (saved / name).write_text(str(content))
    else:
        torch.save({**torch.load(saved / "common.pt"), name: content}, saved / "common.pt")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("metadata.json", text) for text in ("[]", "null", '{"a": 1}', "[" * 100_000)),
        *(("opt_param_scheduler", value) for value in (None, [])),
        ("optimizer", [1]),
    ],
)
def test_values_of_another_kind_are_told_in_one_line(name, content, saved, flags, refused):
    of_another_kind(saved, name, content)
    line = flags("--train-iters", 2, "--load", saved.parent, "--no-plot", "--eval-iters", 0)
    assert f"the checkpoint {saved} cannot be read: " in refused("pretrain", *line)


def in_ranks(saved: Path, mark: Path) -> None:
    """Make it a checkpoint of the format torch."""
    shutil.rmtree(saved)
    (saved / "mp_rank_00").mkdir(parents=True)
    torch.save({"args": Runs(mark)}, saved / "mp_rank_00" / "model_optim_rng.pt")


@pytest.mark.parametrize(
    ("version", "put"),
    [
        ("0.12.1", in_common),
        ("0.12.1", in_ranks),
        ("0.16.1", in_metadata),
        ("0.16.1", in_values),
        ("0.16.1", in_ranks),
    ],
)
def test_stock_scripts_run_nothing(version, put, saved, tmp_path, dataset):
    tree = checkout("megatron_core", version)
    put(saved, tmp_path / "mark")
    form = "torch" if put is in_ranks else "torch_dist"
    size = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split()
    size += "--max-position-embeddings 32 --vocab-size 255".split()
    line = [*size, *f"--load {saved.parent} --ckpt-format {form}".split()]
    if put is not in_values:  # states of random generators, which a finetuning begins anew
        line.append("--finetune")
    done = stock_core.pretrain(tree, tmp_path, *line, data=dataset)
    assert done.returncode == 2, done.stderr[-3000:]
    assert " refers to posix.mkdir" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "mark").exists()


def test_what_switches_torchs_safety_off_is_refused(refused, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert "or also set MEGATRON_NPU_TRUST_FILES=1" in refused("generate", "--load", "x", "--prompt", "y")
    monkeypatch.setenv("MEGATRON_NPU_TRUST_FILES", "1")
    assert "contains no checkpoint" in refused("generate", "--load", "x", "--prompt", "y")


def test_trusted_files_run_and_the_log_says_so(saved, tmp_path):
    in_metadata(saved, tmp_path / "mark")
    line = tiny.command("generate", "--load", str(saved.parent), "--prompt", "1 2")
    done = tiny.run_python(line, {**tiny.environment(), "MEGATRON_NPU_TRUST_FILES": "1"})
    assert "MEGATRON_NPU_TRUST_FILES=1: checkpoints may execute the code that they contain" in done.stderr
    assert (tmp_path / "mark").is_dir()


@pytest.fixture
def cached(dataset, flags, tmp_path, capsys):
    """Return a function that runs one iteration with a cache of indices of its own, and the cache."""
    cache = tmp_path / "cache"

    def run(*changes: object) -> int:
        line = flags("--train-iters", 1, "--eval-iters", 0, "--data-cache-path", cache, "--no-plot", *changes)
        return cli.main(["pretrain", *line])

    assert run("--json-log", tmp_path / "first") == 0
    capsys.readouterr()
    return run, cache


@pytest.mark.parametrize("objects", [False, True])
def test_a_pickle_for_an_index_is_refused(objects, cached, tmp_path, refused, flags):
    _, cache = cached
    for file in cache.rglob("*document_index.npy"):
        if objects:
            np.save(file, np.array([Runs(tmp_path / "mark")], dtype=object), allow_pickle=True)
        else:
            file.write_bytes(pickle.dumps(Runs(tmp_path / "mark")))
    line = flags("--train-iters", 1, "--eval-iters", 0, "--data-cache-path", cache, "--no-plot")
    assert "posix.mkdir" in refused("pretrain", *line)
    assert not (tmp_path / "mark").exists()


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def beyond(file: Path) -> None:
    index = np.load(file)
    index.flat[-1] = np.iinfo(index.dtype).max
    np.save(file, index)


def before(file: Path) -> None:
    index = np.load(file).astype(np.int64)
    index.flat[0] = -7
    np.save(file, index)


@pytest.mark.parametrize("which", ["document_index", "sample_index", "shuffle_index"])
@pytest.mark.parametrize("damage", [truncated, emptied, beyond, before])
def test_a_damaged_index_is_made_anew(damage, which, cached, tmp_path, caplog):
    run, cache = cached
    files = sorted(cache.rglob(f"*{which}.npy"))
    assert files
    whole = {file: file.read_bytes() for file in files}
    for file in files:
        damage(file)
    assert run("--json-log", tmp_path / "again") == 0
    assert "rebuilding it" in caplog.text
    assert {file: file.read_bytes() for file in files} == whole
    assert tiny.losses(tmp_path / "again") == tiny.losses(tmp_path / "first")
