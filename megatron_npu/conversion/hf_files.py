"""Weights of Hugging Face on disk: read one tensor at a time, written in shards of a given size."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_npu import files
from megatron_npu.errors import UsageError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Older files. torch reads them without running what they contain (weights_only).
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# What is written: name of a file alone -> pattern of its shards' names, their index.
FORMATS = {
    SINGLE: ("model{suffix}.safetensors", INDEX),
    PICKLED: ("pytorch_model{suffix}.bin", PICKLED_INDEX),
}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}  # of safetensors


def require(*libraries: str) -> None:
    """Check that libraries of Hugging Face are there.

    Raises:
        UsageError: one is not.
    """
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            raise UsageError(
                f"{library} is not installed",
                "what reads and writes the files",
                'pip install "megatron_npu[hf]"',
            )


class Source:
    """The tensors of a folder.

    Args:
        folder: with ``model.safetensors`` or ``pytorch_model.bin``, or with shards and their index.

    Raises:
        UsageError: there are none, or they are broken.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {name: file for file in _files(folder) for name in self._names_in(file)}

    def _names_in(self, file: Path) -> list[str]:
        if file.suffix == ".bin":
            return list(_unpickled(file))
        with _opened(file) as content:
            return list(content.keys())

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return sorted(self._files)

    def dtype(self, name: str) -> str:
        """Return the type of a tensor, such as ``float32``, without reading it."""
        file = self._files[name]
        if file.suffix == ".bin":
            return str(_unpickled(file)[name].dtype).removeprefix("torch.")
        with _opened(file) as content:
            kind = content.get_slice(name).get_dtype()
        return _DTYPES.get(kind, kind)

    def read(self, name: str) -> Tensor:
        """Return a tensor, on the host."""
        file = self._files[name]
        if file.suffix == ".bin":
            return _unpickled(file)[name]
        with _opened(file) as content:
            return content.get_tensor(name)


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file}: {error}", "a file of safetensors", "Get a fresh copy.") from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds, with pages of advice
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{file}: {reason}", "a file of tensors alone", "Take the safetensors.") from error


def _files(folder: Path) -> list[Path]:
    """Return the files that hold the tensors of a folder."""
    for single, index in ((SINGLE, INDEX), (PICKLED, PICKLED_INDEX)):
        if (folder / index).is_file():
            return _shards(folder / index)
        if (folder / single).is_file():
            return [folder / single]
    raise UsageError(
        f"{folder}: no weights", f"{SINGLE}, {INDEX} or {PICKLED}", "Give the folder of a Hugging Face model."
    )


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"{index}: {error}", "an index of shards", "Get a fresh copy.") from error
    for name in names:
        # an index must not lead out of its folder
        if not isinstance(name, str) or Path(name).name != name or not (index.parent / name).is_file():
            raise UsageError(f"{index} names {name!r}", "a file in its folder", "Get the missing shard.")
    return [index.parent / name for name in sorted(names)]


def write(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    sizes: Mapping[str, int],
    limit: int,
    form: str = SINGLE,
) -> None:
    """Write tensors into shards, which huggingface_hub plans, and their index.

    The files are our own: a shard is written as soon as its last tensor has come, so that there is one in
    memory at a time (and a tensor that is a shard by itself), where the library wants the whole model.

    Args:
        folder: where to; it exists.
        tensors: names and tensors in the order of ``sizes``.
        sizes: bytes of each tensor.
        limit: bytes of a shard; a larger tensor has one to itself.
        form: a key of ``FORMATS``.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=lambda size: size,
        filename_pattern=FORMATS[form][0],
        max_shard_size=limit,
    )
    shards: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        file = plan.tensor_to_filename[name]
        shard = shards.setdefault(file, {})
        shard[name] = tensor.contiguous().clone()
        if len(shard) == len(plan.filename_to_tensors[file]):
            _save(shards.pop(file), folder / file)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        files.write(folder / FORMATS[form][1], json.dumps(index, indent=2) + "\n")


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    if file.suffix == ".bin":
        torch.save(tensors, file)
        return
    from safetensors.torch import save_file

    save_file(tensors, str(file), metadata={"format": "pt"})
