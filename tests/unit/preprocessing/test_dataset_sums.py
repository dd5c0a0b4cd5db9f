"""Checksums beside a dataset: one flipped bit of it is told, by the command and before a run begins."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import command, dataset_sums, indexed_dataset
from tests.support import tiny as numbers
from tests.unit.preprocessing.conftest import SAMPLE


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_flipped_bit_is_told(
    corpus_file: Callable[..., Path],
    preprocess: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    ending: str,
) -> None:
    prefix = preprocess(corpus_file([{"text": SAMPLE}] * 9)).with_name("out_text_document")
    assert command.main(["--verify", str(prefix)]) == 0
    assert capsys.readouterr().out.endswith(f"{prefix}: unchanged since it was written\n")
    file = Path(f"{prefix}.{ending}")
    flip(file, -3 if ending == "bin" else indexed_dataset.HEADER.size)
    assert command.main(["--verify", str(prefix), str(prefix)]) == 1
    told = capsys.readouterr().out
    assert told.count("\n") == 2
    assert str(file) in told
    dataset_sums.path_of(prefix).unlink()
    if ending == "bin":
        indexed_dataset.validate(prefix)
        assert command.main(["--verify", str(prefix)]) == 1
        assert "no checksums" in capsys.readouterr().out


def test_a_run_does_not_begin_on_it(tmp_path: Path) -> None:
    data = numbers.write_dataset(tmp_path / "numbers", documents=20)
    flip(Path(f"{data}.bin"), 101)
    run = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8"
    run += " --micro-batch-size 2 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer"
    done = numbers.run("pretrain", *run.split(), "--vocab-size", str(numbers.SIZE), "--data-path", str(data))
    assert done.returncode == 2
    assert (
        f"the dataset is damaged: {data}.bin differs from what was written, at or after byte 0" in done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_in_the_place_of_the_checksums_is_told(tmp_path: Path, kind: str) -> None:
    data = numbers.write_dataset(tmp_path / "numbers", documents=20)
    sums = dataset_sums.path_of(data)
    sums.unlink()
    assert not dataset_sums.exist(data)
    os.mkfifo(sums) if kind == "pipe" else sums.symlink_to("nowhere")
    for told in (dataset_sums.exist, indexed_dataset.validate):
        with pytest.raises(
            UsageError, match="must be the checksum file of a dataset, but is not a regular file"
        ):
            told(data)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_bytes_in_any_pieces_have_the_sums_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(dataset_sums, "BLOCK", 100)
    content = np.random.default_rng(size).bytes(size)
    summer, place = dataset_sums.Summer(), 0
    for length in (0, 1, 98, 1, 250, 2000):
        summer.add(content[place : place + length])
        place += length
    (tmp_path / "x.bin").write_bytes(content)
    (tmp_path / "x.idx").write_bytes(b"")
    dataset_sums.write(tmp_path / "x", {"bin": summer.sums(), "idx": dataset_sums.Summer().sums()})
    assert dataset_sums.require(tmp_path / "x", whole=True)
    for at in range(0, size, 50):
        flip(tmp_path / "x.bin", at)
        with pytest.raises(UsageError, match=rf"at or after byte {at // 100 * 100}\."):
            dataset_sums.require(tmp_path / "x")
        flip(tmp_path / "x.bin", at)


def test_of_a_large_file_a_part_is_compared_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_sums, "BLOCK", 10)
    summer = dataset_sums.Summer()
    (tmp_path / "x.bin").write_bytes(bytes(10_000))
    (tmp_path / "x.idx").write_bytes(b"")
    summer.add(bytes(10_000))
    dataset_sums.write(tmp_path / "x", {"bin": summer.sums(), "idx": dataset_sums.Summer().sums()})
    flip(tmp_path / "x.bin", 10 * 500)
    assert dataset_sums.require(tmp_path / "x")
    with pytest.raises(UsageError, match=r"at or after byte 5000\."):
        dataset_sums.require(tmp_path / "x", whole=True)
    for at in (0, 9_999):  # the ends are among what is compared
        flip(tmp_path / "x.bin", at)
        with pytest.raises(UsageError, match=rf"at or after byte {at // 10 * 10}"):
            dataset_sums.require(tmp_path / "x")
        flip(tmp_path / "x.bin", at)
