"""Bad input: one line, exit code 2, no traceback, nothing overwritten."""

from __future__ import annotations

import resource
import shutil
import socket

import pytest

from megatron_npu.checkpoint_files import checksums
from megatron_npu.commands import cli
from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.run import pretrain
from tests.support import tiny
from tests.support.fake_checkouts import make_legacy

pytest.importorskip("megatron.core")


@pytest.fixture
def copy(dataset, tmp_path):
    """A dataset that a test may spoil."""
    for ending in (".bin", ".idx"):
        shutil.copy(f"{dataset}{ending}", tmp_path / f"copy{ending}")
    return tmp_path / "copy"


@pytest.mark.parametrize("command", ["generate --prompt a", "lambada --valid-data a"])
def test_another_megatron_comes_first(refused, tmp_path, monkeypatch, command):
    """As for ``python -m megatron_npu`` typed in a tree of 2023."""
    make_legacy(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    line = refused(*command.split(), "--load", tmp_path)
    assert "megatron-core is required, but the Megatron in" in line
    assert "is megatron_lm unknown. " in line
    assert "start from another folder" in line


@pytest.mark.parametrize("ending", [".bin", ".idx"])
@pytest.mark.parametrize("spoil", ["missing", "truncated"])
def test_spoilt_data(refused, flags, copy, ending, spoil):
    path = copy.with_suffix(ending)
    content = path.read_bytes()
    path.unlink()
    if spoil == "truncated":
        path.write_bytes(content[: len(content) // 2])
    assert str(path) in refused("pretrain", *flags("--data-path", copy))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--vocab-size", 100], "token id 255"),
        (["--seq-length", 64], "--max-position-embeddings 32"),
        (["--tensor-model-parallel-size", 2], "the number of processes must be a multiple of"),
        (["--global-batch-size", 3, "--micro-batch-size", 2], "--global-batch-size must be a multiple of"),
        (["--load", "no/such/directory"], "contains no checkpoint"),
        (["--split", "999,1,0"], "leaves no document of the 100"),
        (["--recompute-granularity", "selective", "--recompute-modules", "nonsense"], "nonsense"),
    ],
)
def test_flags_that_do_not_fit(refused, flags, changes, named):
    assert named in refused("pretrain", *flags(*changes))


@pytest.mark.parametrize("flag", ["--save", "--json-log", "--tensorboard-dir", "--data-cache-path"])
def test_places_below_a_file(refused, flags, tmp_path, flag):
    (tmp_path / "file").touch()
    assert f"{flag} requires a directory, but {tmp_path / 'file'} is a file" in refused(
        "pretrain", *flags(flag, tmp_path / "file" / "a" / "b")
    )


def test_a_log_is_not_added_to_other_files(refused, flags, tmp_path):
    (tmp_path / "data.idx").write_bytes(b"MMIDIDX")
    assert "--json-log must be a new file or the log of a run, but" in refused(
        "pretrain", *flags("--json-log", tmp_path / "data.idx")
    )
    assert (tmp_path / "data.idx").read_bytes() == b"MMIDIDX"


@pytest.mark.skipif("os.geteuid() == 0", reason="the case: root may write everywhere")
def test_a_directory_that_is_read_only(refused, flags, tmp_path):
    tmp_path.chmod(0o500)
    assert "cannot be written" in refused("pretrain", *flags("--save", tmp_path / "new"))


def test_indices_that_cannot_be_written(flags, copy, capsys):
    """Data are often shared, and read-only."""
    copy.touch()  # where the folder of the indices would be
    assert cli.main(["pretrain", *flags("--data-path", copy)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the index files of the dataset cannot be written" in last
    assert "--data-cache-path" in last


def test_a_full_disk_costs_the_last_checkpoint_alone(train, flags, tmp_path, capfd):
    save = tmp_path / "run"
    train("--save", save, "--exit-interval", 3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        assert cli.main(["pretrain", *flags("--load", save, "--save", save)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert f"the checkpoint of iteration 6 could not be written to {save}" in err.splitlines()[-1]
    summary = train("--load", save, "--save", save)
    assert summary.iterations == 6
    assert sorted(tiny.losses(save / "metrics.jsonl")) == [1, 2, 3, 4, 5, 6]


def test_a_directory_that_does_not_exist_yet_is_where_a_resumable_run_begins(train, tmp_path, capsys):
    new = tmp_path / "new"
    train("--save", new, "--load", new)
    assert "starting from scratch" in capsys.readouterr().out


@pytest.fixture(scope="module")
def made(dataset, tmp_path_factory):
    place = tmp_path_factory.mktemp("made") / "trained"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_NPU_DEVICE", "cpu")
        pretrain.train(arguments.parse([*tiny.flags_for(dataset), "--save", str(place)]))
    return place


@pytest.fixture
def trained(made, tmp_path):
    """A directory with a checkpoint at iteration 6, which a test may spoil."""
    return shutil.copytree(made, tmp_path / "trained")


def _content(directory):
    return {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["--hidden-size", 64], "--hidden-size 64 (checkpoint: 32)"),
        (["--num-layers", 4], "--num-layers 4 (checkpoint: 2)"),
        (["--vocab-size", 300], "vocabulary size 301 (checkpoint: 256)"),
        (["--swiglu"], "--swiglu on (checkpoint: off)"),
        (["--max-position-embeddings", 64], "--max-position-embeddings 64 (checkpoint: 32)"),
        (["--use-distributed-optimizer"], "--use-distributed-optimizer"),
        (["--lr", 0.5], "--override-opt_param-scheduler"),
    ],
)
def test_a_checkpoint_of_another_run(refused, flags, trained, changes, named):
    before = _content(trained)
    assert named in refused("pretrain", *flags("--load", trained, "--save", trained, *changes))
    assert _content(trained) == before


@pytest.mark.parametrize("spoil", ["missing", "truncated"])
def test_a_checkpoint_that_is_not_whole(flags, trained, capsys, spoil):
    """Without its checksums, as those of older versions are; with them: test_damage.py."""
    (trained / "iter_0000006" / "checksums.json").unlink()
    for path in sorted((trained / "iter_0000006").glob("[_c.m]*")):  # all but our own description
        content = path.read_bytes()
        path.unlink()
        if spoil == "truncated":
            path.write_bytes(content[: len(content) // 2])
        assert cli.main(["pretrain", *flags("--load", trained, "--save", trained)]) == 2
        path.write_bytes(content)
        out, err = capsys.readouterr()
        assert "Traceback" not in out
        last = err.splitlines()[-1]
        assert f"the checkpoint {path.parent}" in last
        # what to do: for a shard that the index names and that is not there, the newest whole one
        assert "latest_checkpointed_iteration.txt" in last or "--load-last-good" in last


def test_checkpoints_of_another_run_are_not_overwritten(refused, flags, trained):
    before = _content(trained)
    assert "already contains checkpoints" in refused("pretrain", *flags("--save", trained))
    again = ("--save", trained, "--load", trained, "--finetune")
    assert "already contains checkpoints" in refused("pretrain", *flags(*again))
    assert _content(trained) == before


def test_an_absent_device(flags, monkeypatch):
    monkeypatch.setattr(tiny, "environment", _with_npu(tiny.environment()))
    done = tiny.run("pretrain", *flags())
    assert done.returncode == 2
    assert "MEGATRON_NPU_DEVICE=npu" in done.stderr
    assert "Traceback" not in done.stderr


def _with_npu(environment):
    return lambda: {**environment, "MEGATRON_NPU_DEVICE": "npu"}


def test_several_ranks_speak_once_and_all_end_with_2(flags):
    done = tiny.run("pretrain", *flags("--tensor-model-parallel-size", "3"), processes=2)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "megatron-npu pretrain: error:" in line]
    assert [line.startswith("megatron-npu") for line in said] == [True, False]
    assert said[1].split(" : ", 1) == ["  traceback", said[0]]  # below torchrun's "Root Cause"
    assert 'Traceback (most recent call last):\n  File "<frozen runpy>"' not in done.stdout
    assert "exitcode  : 2" in done.stderr


def test_a_port_that_is_taken_is_named(refused, flags, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        line = refused("pretrain", *flags())
    assert f"MASTER_PORT {port} is in use by another program on this machine" in line
    assert "Export another MASTER_PORT for all ranks." in line


def test_generate(refused, trained, capsys):
    assert "contains no checkpoint" in refused("generate", "--load", "no/such", "--prompt", "1")
    assert "64 positions" not in refused("generate", "--load", trained, "--prompt", "x")
    assert "which together exceed the model's 32 positions" in refused(
        "generate", "--load", trained, "--prompt", "1 2", "--num-tokens", "31"
    )
    assert "--bogus" in refused("generate", "--load", trained, "--prompt", "1", "--bogus")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            [],
            "--sample-input-file FILE, or --num-samples N (0 starts an interactive conversation)",
        ),
        (["--prompt", ""], "for unconditional samples use --num-samples 1 without a prompt"),
        (
            ["--prompt", "1", "--sample-input-file", "f"],
            "--prompt and --sample-input-file are mutually exclusive",
        ),
        (["--prompt", "1", "--num-samples", "0"], "--num-samples 0 and --prompt are mutually exclusive"),
        (["--prompt", " ".join(["1"] * 32)], "the prompt has 32 tokens, but it must have at most 31"),
        (["--prompt", "\udcff"], "the text must consist of numbers from 0 to"),
        (["--num-samples", "1", "--out-seq-length", "33"], "at most the model's 32 positions"),
        (["--num-samples", "1", "--genfile", "no/such/file"], "no/such does not exist"),
        (
            ["--num-samples", "1", "--num-layers", "3"],
            "--num-layers must be 2, the checkpoint's value, but got 3",
        ),
        (
            ["--num-samples", "1", "--tensor-model-parallel-size", "2"],
            "Start torchrun with --nproc-per-node 2",
        ),
        (["--sample-input-file", "no/such/file"], "No such file"),
    ],
)
def test_generate_is_told_what_it_cannot_do(refused, trained, line, told):
    assert told in refused("generate", "--load", trained, *line)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"1 2\n\n3\n", "line 2: the prompt is empty"),
        (b"", "no prompt"),
        (b"1\n\xff\n", "not UTF-8"),
        (b"1\n" + b"2 " * 40, "line 2: the prompt has 40 tokens"),
    ],
)
def test_files_of_prompts(refused, trained, tmp_path, content, told):
    (tmp_path / "prompts").write_bytes(content)
    assert told in refused("generate", "--load", trained, "--sample-input-file", tmp_path / "prompts")
    assert not (tmp_path / "prompts.out").exists()


def test_a_vocabulary_that_does_not_fit_the_checkpoint(refused, dataset, train, gpt2_vocab, tmp_path):
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", gpt2_vocab.vocab_file, "--merge-file"]
    train(
        *flags, gpt2_vocab.merge_file, "--vocab-size", 50300, "--train-iters", 0, "--save", tmp_path / "saved"
    )
    (description,) = (tmp_path / "saved").glob("*/arguments.json")
    text = description.read_text()
    description.write_text(text.replace(": 50300", ": 50000"))
    checksums.renew(description)
    told = refused("generate", "--load", tmp_path / "saved", "--prompt", "a")
    assert "the tokenizer has 50257 tokens, but the model was trained with 50000" in told
