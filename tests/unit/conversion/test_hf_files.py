"""Files of weights: shards of a limited size, and nothing that leads out of the folder or runs."""

from __future__ import annotations

import json
import pickle
import weakref

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("huggingface_hub")

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import hf_files
from tests.support.payload import Runs

TENSORS = {"b": torch.arange(6.0), "a": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.zeros(3)}


@pytest.mark.parametrize(("limit", "files"), [(1000, 1), (36, 2), (1, 3)])
def test_shards_are_read_as_they_were_written(tmp_path, limit, files):
    hf_files.write(tmp_path, TENSORS.items(), TENSORS, limit)
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    source = hf_files.Source(tmp_path)
    assert source.names() == ["a", "b", "c"]
    for name, tensor in TENSORS.items():
        assert torch.equal(source.read(name), tensor)
        assert f"torch.{source.dtype(name)}" == str(tensor.dtype)


def test_a_large_tensor_between_small_ones_is_a_shard_by_itself(tmp_path):
    tensors = {"a": torch.ones(1), "large": torch.ones(20), "b": torch.ones(2)}
    sizes = {name: tensor.numel() * 4 for name, tensor in tensors.items()}
    hf_files.write(tmp_path, tensors.items(), tensors, 16)
    index = json.loads((tmp_path / hf_files.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert index["weight_map"]["a"] == index["weight_map"]["b"] != index["weight_map"]["large"]
    for name, tensor in tensors.items():
        assert torch.equal(hf_files.Source(tmp_path).read(name), tensor)


def test_a_view_is_written_as_its_own_tensor(tmp_path):
    whole = torch.arange(6.0).reshape(2, 3)
    tensors = {"t": whole.t(), "row": whole[1]}
    hf_files.write(tmp_path, tensors.items(), tensors, 1000)
    assert torch.equal(hf_files.Source(tmp_path).read("t"), whole.t())
    assert torch.equal(hf_files.Source(tmp_path).read("row"), whole[1])


def test_pieces_are_the_whole(tmp_path, monkeypatch):
    tensors = {"rows": torch.arange(35.0).reshape(7, 5), "one": torch.tensor(3.0), "none": torch.zeros(0, 2)}
    hf_files.write(tmp_path, tensors.items(), tensors, 1000)
    source = hf_files.Source(tmp_path)
    monkeypatch.setattr(hf_files, "_PIECE", 45)  # two rows
    pieces = list(source.in_pieces("rows"))
    assert [len(piece) for piece in pieces] == [2, 2, 2, 1]
    assert torch.equal(torch.cat(pieces), tensors["rows"])
    assert [piece.tolist() for piece in source.in_pieces("one")] == [3.0]
    assert not list(source.in_pieces("none"))
    assert source.numel("rows") == 35


def test_what_is_written_is_not_kept(tmp_path):
    alive: list[weakref.ref] = []

    def given():
        for name in "abc":
            assert sum(reference() is not None for reference in alive) <= 1  # the last one
            tensor = torch.ones(8)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    hf_files.write(tmp_path, given(), {name: torch.ones(8, device="meta") for name in "abc"}, 1000)
    assert hf_files.Source(tmp_path).names() == ["a", "b", "c"]


def test_older_files_of_torch(tmp_path):
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    source = hf_files.Source(tmp_path)
    assert torch.equal(source.read("b"), TENSORS["b"])
    assert source.dtype("a") == "bfloat16"


@pytest.mark.parametrize(("opener", "form"), [("_opened", hf_files.SINGLE), ("_unpickled", hf_files.PICKLED)])
def test_a_file_is_not_opened_for_each_of_its_tensors(tmp_path, monkeypatch, opener, form):
    """With 300,000 empty tensors, whose names are read at each opening, this took hours."""
    tensors = {f"layers.{number}": torch.zeros(0) for number in range(100)}
    hf_files.write(tmp_path, tensors.items(), tensors, 1000, form)
    real, opened = getattr(hf_files, opener), []
    monkeypatch.setattr(hf_files, opener, lambda file: opened.append(file) or real(file))
    source = hf_files.Source(tmp_path)
    for name in source.names():
        assert source.dtype(name) == "float32"
        assert source.numel(name) == source.read(name).numel() == 0
    assert len(opened) == 1


def test_what_is_mapped_is_released(tmp_path, monkeypatch):
    tensors = {name: torch.ones(10) for name in "abcd"}
    hf_files.write(tmp_path, tensors.items(), tensors, 1000)
    real, opened = hf_files._opened, []
    monkeypatch.setattr(hf_files, "_opened", lambda file: opened.append(file) or real(file))
    monkeypatch.setattr(hf_files, "_MAPPED", 79)  # two tensors
    source = hf_files.Source(tmp_path)
    assert all(torch.equal(source.read(name), tensors[name]) for name in "abcd")
    assert len(opened) == 2


def test_what_would_run_is_refused(tmp_path):
    torch.save({"a": Runs(str(tmp_path / "ran"))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin"):
        hf_files.Source(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(str(tmp_path / "ran"))))
    with pytest.raises(UsageError, match=r"pytorch_model\.bin"):
        hf_files.Source(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "missing.safetensors"])
def test_an_index_stays_in_its_folder(tmp_path, shard):
    folder = tmp_path / "model"
    folder.mkdir()
    hf_files.write(folder, TENSORS.items(), TENSORS, 1000)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / hf_files.INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(UsageError, match=r"index\.json lists"):
        hf_files.Source(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (hf_files.SINGLE, b"no header"),
        (hf_files.INDEX, b"{}"),
        (hf_files.INDEX, b"{"),
        (hf_files.INDEX, b'{"weight_map": {"a": 5, "b": "x", "c": null}}'),
        (hf_files.INDEX, b'{"weight_map": {"a": [1]}}'),
        (hf_files.INDEX, b"[" * 100_000),
        ("other", b""),
    ],
)
def test_broken_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError):
        hf_files.Source(tmp_path)
