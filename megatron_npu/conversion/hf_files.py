"""Read Hugging Face weight files one tensor at a time, and write weights in shards of a given size."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.checkpoint_files import stranger_weights
from megatron_npu.safe_files import expanded_size

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Older files. torch reads them without running what they contain (weights_only).
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# What is written: name of a file alone -> pattern of its shards' names, their index.
FORMATS = {
    SINGLE: ("model{suffix}.safetensors", INDEX),
    PICKLED: ("pytorch_model{suffix}.bin", PICKLED_INDEX),
}
_PIECE = 16 << 20  # bytes that are compared at a time
_MAPPED = 8 << 20  # bytes that are read before mapped memory, which counts as resident, is released
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}  # of safetensors


def require(*libraries: str) -> None:
    """Check that the given Hugging Face libraries are installed.

    Raises:
        UsageError: a library is missing.
    """
    for library in libraries:
        if not is_installed(library):
            raise UsageError(
                f"{library} is not installed, but it is required to read and write these files. Install it: "
                'pip install "megatron_npu[hf]"'
            )


class Source:
    """Reader for the tensors in a folder of Hugging Face weights.

    Args:
        folder: a folder with ``model.safetensors`` or ``pytorch_model.bin``, or with shards and their index.

    Raises:
        UsageError: the folder has no weights, or the weights are damaged or differ from those on the hub.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stranger_weights.require_as_downloaded(folder)
        self._looked_at: set[str] = set()
        self._open: dict[Path, Any] = {}  # opening a file takes time for each of its tensors
        self._mapped = 0
        self._files = {name: file for file in _files(folder) for name in self._content(file).keys()}  # noqa: SIM118

    def _content(self, file: Path) -> Any:
        """Return the content of a file: a dict of tensors, or an open safetensors reader."""
        if file not in self._open:
            self._open[file] = _unpickled(file) if file.suffix == ".bin" else _opened(file)
        return self._open[file]

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return sorted(self._files)

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, such as ``float32``, without reading the tensor."""
        file = self._files[name]
        if file.suffix == ".bin":
            return str(self._content(file)[name].dtype).removeprefix("torch.")
        kind = self._content(file).get_slice(name).get_dtype()
        return _DTYPES.get(kind, kind)

    def read(self, name: str) -> Tensor:
        """Return a tensor in host memory.

        Warn once if it has values that no trained model contains.
        """
        tensor = self._read(name)
        if name not in self._looked_at:
            self._looked_at.add(name)
            stranger_weights.tell_of_implausible(self._files[name], [(name, tensor)])
        return tensor

    def _read(self, name: str) -> Tensor:
        file = self._files[name]
        content = self._content(file)
        tensor = content[name] if file.suffix == ".bin" else content.get_tensor(name)
        self._mapped += _size(tensor)
        if self._mapped > _MAPPED:
            self._open.clear()
            self._mapped = 0
        return tensor

    def numel(self, name: str) -> int:
        """Return the number of elements of a tensor without reading it."""
        file = self._files[name]
        if file.suffix == ".bin":
            return self._content(file)[name].numel()
        return math.prod(self._content(file).get_slice(name).get_shape())

    def in_pieces(self, name: str) -> Iterator[Tensor]:
        """Yield the rows of a tensor in blocks, releasing the file's mapped memory between blocks."""
        file = self._files[name]
        whole = self._read(name)
        if file.suffix == ".bin" or whole.dim() == 0:
            yield whole
            return
        rows, step = len(whole), max(1, _PIECE * len(whole) // max(1, _size(whole)))
        del whole  # which was not read, but mapped
        for first in range(0, rows, step):
            with _opened(file) as content:
                yield content.get_slice(name)[first : first + step]


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        files.regular(file).close()  # whose error says what is wrong
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} is not a valid safetensors file: {error}. Get a fresh copy.") from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        with expanded_size.checked():
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except expanded_size.ExpandedSizeError:
        raise
    except Exception as error:  # torch raises many kinds, with pages of advice
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"{file} cannot be loaded as a file that contains only tensors: {reason}. Use the "
            "safetensors file."
        ) from error


def _files(folder: Path) -> list[Path]:
    """Return the paths of those files in a folder that contain its tensors."""
    for single, index in ((SINGLE, INDEX), (PICKLED, PICKLED_INDEX)):
        if (folder / index).is_file():
            return _shards(folder / index)
        if (folder / single).is_file():
            return [folder / single]
    raise UsageError(
        f"{folder} contains no weights; it must have {SINGLE}, {INDEX} or {PICKLED}. Pass the folder of a "
        "Hugging Face model."
    )


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(files.text(index))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{index} is not a valid JSON index of weight files: {error}. Get a fresh copy."
        ) from error
    for name in names:
        # an index must not lead out of its folder
        if not isinstance(name, str) or Path(name).name != name or not (index.parent / name).is_file():
            raise UsageError(
                f"{index} lists {name!r}, which is not in its folder; all listed files must be in that "
                "folder. Get the missing shard."
            )
    return [index.parent / name for name in sorted(names)]


def write(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    planned: Mapping[str, Tensor],
    limit: int,
    form: str = SINGLE,
) -> None:
    """Write tensors and an index to shards that huggingface_hub has planned.

    Only one tensor is held in memory at a time, or one shard if the files are pickled.

    Args:
        folder: an existing folder.
        tensors: the names and tensors, in the same order as ``planned``.
        planned: tensors with the same shapes and dtypes, which may be meta tensors.
        limit: the maximum number of bytes per shard. A tensor that exceeds the limit is written to its own
            shard.
        form: the file format, a key of ``FORMATS``.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    pattern, index = FORMATS[form]
    plan = split_state_dict_into_shards_factory(
        dict(planned), get_storage_size=_size, filename_pattern=pattern, max_shard_size=limit
    )
    shards: dict[str, dict[str, Tensor]] = {file: {} for file in plan.filename_to_tensors}
    for name in planned:
        shards[plan.tensor_to_filename[name]][name] = planned[name]
    _write_shards(folder, tensors, shards, _pickle if form == PICKLED else _stream)
    if plan.is_sharded:
        content = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        files.write(folder / index, json.dumps(content, indent=2) + "\n")


_Writer = Callable[[Path, Mapping[str, Tensor]], Generator[None, tuple[str, Tensor], None]]


def _write_shards(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shards: Mapping[str, Mapping[str, Tensor]],
    writer: _Writer,
) -> None:
    """Pass each tensor to the writer of the shard to which it belongs.

    A writer is created before the first tensor of its shard and closed after the last one.
    """
    home = {name: file for file, planned in shards.items() for name in planned}
    with contextlib.ExitStack() as stack:
        begun: dict[str, Generator[None, tuple[str, Tensor], None]] = {}
        for name, tensor in tensors:
            file = home[name]
            if file not in begun:
                begun[file] = stack.enter_context(contextlib.closing(writer(folder / file, shards[file])))
                next(begun[file])
            with contextlib.suppress(StopIteration):  # its last one
                begun[file].send((name, tensor))


def _pickle(file: Path, planned: Mapping[str, Tensor]) -> Generator[None, tuple[str, Tensor], None]:
    """Write a file in torch's format after receiving all of its tensors."""
    content = {}
    for _ in planned:
        name, tensor = yield
        content[name] = tensor.contiguous().clone()
    torch.save(content, file)


def _stream(file: Path, planned: Mapping[str, Tensor]) -> Generator[None, tuple[str, Tensor], None]:
    """Write a safetensors file one tensor at a time.

    The safetensors library is not used because it requires all tensors at once. A file consists of eight
    bytes that give the length of the header, the header in JSON, and the bytes of the tensors.
    """
    with open(file, "wb") as stream:
        stream.write(_header(planned))
        for expected in planned:
            name, tensor = yield
            shape, dtype = planned[expected].shape, planned[expected].dtype
            if (name, tensor.shape, tensor.dtype) != (expected, shape, dtype):
                raise AssertionError(f"the next tensor to write must be the planned one, but got {name}")
            stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor
        files.sync(stream)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _header(planned: Mapping[str, Tensor]) -> bytes:
    """Return the header of a safetensors file that contains the given tensors in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = {f"torch.{name}": short for short, name in _DTYPES.items()}
    end = 0
    for name, tensor in planned.items():
        begin, end = end, end + _size(tensor)
        kind = names[str(tensor.dtype)]
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8
    return struct.pack("<Q", len(text)) + text
