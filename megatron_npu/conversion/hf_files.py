"""Weights of Hugging Face on disk: read one tensor at a time, written in shards of a given size."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_npu.errors import UsageError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Older files. torch reads them without running what they contain (weights_only).
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}  # of safetensors


def require_safetensors() -> None:
    """Check that the library is there.

    Raises:
        UsageError: it is not.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise UsageError(
            "safetensors is not installed",
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
        raise UsageError(f"{file}: {error}", "a file of safetensors", "Get it anew.") from error


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
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"{index}: {error}", "an index of shards", "Get it anew.") from error
    for name in names:
        # an index must not lead out of its folder
        if Path(name).name != name or not (index.parent / name).is_file():
            raise UsageError(f"{index} names {name!r}", "a file beside it", "Get the missing shard.")
    return [index.parent / name for name in names]


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]], sizes: Mapping[str, int], limit: int) -> None:
    """Write tensors into shards.

    Args:
        folder: where to; it exists.
        tensors: names and tensors in the order of ``sizes``; one shard of them is held at a time.
        sizes: bytes of each tensor.
        limit: bytes of a shard; a larger tensor has one for itself.
    """
    from safetensors.torch import save_file

    plan = _plan(sizes, limit)
    source: Iterator[tuple[str, Tensor]] = iter(tensors)
    where: dict[str, str] = {}
    for number, names in enumerate(plan, 1):
        name = SINGLE if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        shard = {key: tensor.contiguous().clone() for key, tensor in (next(source) for _ in names)}
        save_file(shard, str(folder / name), metadata={"format": "pt"})
        where |= dict.fromkeys(names, name)
    if len(plan) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plan(sizes: Mapping[str, int], limit: int) -> Sequence[Sequence[str]]:
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards
