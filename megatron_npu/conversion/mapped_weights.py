"""Apply the weight map of a family in either direction, and check that every tensor is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion.family import Family
from megatron_npu.conversion.hf_files import Source
from megatron_npu.conversion.weight_map import WeightMapping
from megatron_npu.pretrain.flags.frozen_flags import Flags

# What --dtype may say, by Megatron's names.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MANY = 4


@dataclass(frozen=True)
class MappedWeights:
    """The tensors in a Hugging Face folder, which are accessed by their names in the weight map.

    Attributes:
        source: the reader of the files.
        stored: a mapping from names in the weight map to names in the files.
    """

    source: Source
    stored: Mapping[str, str]

    def read(self, name: str) -> Tensor:
        """Return a tensor by its name in the weight map."""
        return self.source.read(self.stored[name])

    def in_pieces(self, name: str) -> Iterator[Tensor]:
        """Yield the rows of a tensor in blocks, given the tensor's name in the weight map."""
        return self.source.in_pieces(self.stored[name])


def open_folder(folder: Path, family: Family) -> MappedWeights:
    """Open the tensors in a Hugging Face folder.

    Raises:
        UsageError: the folder has no weights, or the weights are damaged.
    """
    source = Source(folder)
    return MappedWeights(
        source, {name: stored for stored, name in family.canonical_names(source.names()).items()}
    )


def check_names(found: MappedWeights, family: Family, args: Flags) -> None:
    """Check that each stored tensor is used by exactly one mapping, and that no tensor is missing.

    The files may also contain tied copies of other tensors, and tensors that can be derived from the
    configuration (masks and frequencies). These tensors are compared and then skipped.

    Raises:
        UsageError: tensors are missing or unused; the error names them.
    """
    wanted = _wanted(found, family, args)
    tied = family.tied_weights(args)
    rest = []
    for name in sorted(found.stored.keys() - wanted):
        tensor = found.read(name)
        is_copy = name in tied and torch.equal(tensor, found.read(tied[name]))
        if not is_copy and not family.is_buffer(name, tensor):
            rest.append(name)
    if rest:
        raise _bad_tensors(found, "has", rest, "must contain only the tensors")


def _wanted(found: MappedWeights, family: Family, args: Flags) -> set[str]:
    """Return the names of all tensors that the mappings use, after checking that the tensors exist."""
    wanted: set[str] = set()
    missing: list[str] = []
    for name in (name for mapping in family.weight_map(args) for name in mapping.hf):
        if name in wanted:
            raise AssertionError(f"two mappings of {family.MODEL_TYPE} use the same tensor")
        wanted.add(name)
        if name not in found.stored:
            missing.append(name)
        if len(missing) > _MANY:  # config.json may describe more layers than any memory can count
            break
    if missing:
        raise _bad_tensors(found, "lacks", missing, "must contain every tensor")
    return wanted


def _bad_tensors(found: MappedWeights, verb: str, names: Iterable[str], expected: str) -> UsageError:
    return UsageError(
        f"{found.source.folder} {verb} {_listed(names)}, but it {expected} of the model that config.json "
        "describes. Correct config.json, or get a fresh copy of the files."
    )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:_MANY]) + (" and more" if len(names) > _MANY else "")


def common_dtype(found: MappedWeights, weight_map: Iterable[WeightMapping]) -> str:
    """Return the dtype that all tensors in the weight map share, under Megatron's name.

    Raises:
        UsageError: the tensors have several dtypes, or a dtype that Megatron does not train in.
    """
    kinds = {found.source.dtype(found.stored[name]) for mapping in weight_map for name in mapping.hf}
    for name, dtype in DTYPES.items():
        if kinds == {str(dtype).removeprefix("torch.")}:
            return name
    raise UsageError(
        f"{found.source.folder} contains weights in {', '.join(sorted(kinds))}, but all tensors must have "
        "the same dtype: float32, bfloat16 or float16. Pass --dtype fp32, bf16 or fp16 to convert them all."
    )


def stored_dtype(found: MappedWeights) -> torch.dtype:
    """Return the dtype of the stored tensors, or fp32 if they have different dtypes."""
    kinds = {found.source.dtype(name) for name in found.source.names()}
    return getattr(torch, kinds.pop()) if len(kinds) == 1 else torch.float32


def memory_to_convert(found: MappedWeights, weight_map: Iterable[WeightMapping], dtype: torch.dtype) -> int:
    """Return the number of bytes that a conversion needs: all weights plus twice the largest weight."""
    numbers = [sum(found.source.numel(found.stored[name]) for name in mapping.hf) for mapping in weight_map]
    return (sum(numbers) + 2 * max(numbers)) * dtype.itemsize


@torch.no_grad()
def fill(targets: Mapping[str, Tensor], found: MappedWeights, weight_map: Iterable[WeightMapping]) -> None:
    """Fill every parameter of a ``GPTModel`` in host memory, one mapping after another.

    Raises:
        UsageError: a stored tensor does not have the target's shape.
    """
    unfilled = dict(targets)
    for mapping in weight_map:
        target = unfilled.pop(mapping.megatron)
        target.copy_(mapping.to_megatron(_checked(mapping, target, found)))
    if unfilled:
        raise AssertionError(f"no mapping fills {_listed(unfilled)}")


def _checked(mapping: WeightMapping, target: Tensor, found: MappedWeights) -> Sequence[Tensor]:
    """Return the Hugging Face tensors of a mapping after checking their shapes.

    Raises:
        UsageError: a tensor's shape differs from the one that the mapping requires.
    """
    tensors = [found.read(name) for name in mapping.hf]
    expected = [part.shape for part in mapping.to_hf(target.detach().to("meta"))]
    for name, tensor, shape in zip(mapping.hf, tensors, expected, strict=True):
        if tensor.shape != shape:
            raise UsageError(
                f"{found.source.folder}: {name} must have the shape {list(shape)} according to config.json, "
                f"but its shape is {list(tensor.shape)}. Correct config.json, or get a fresh copy of the "
                "files."
            )
    return tensors


def to_hf(sources: Mapping[str, Tensor], weight_map: Iterable[WeightMapping]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of the Hugging Face tensors for the parameters of a ``GPTModel``.

    Every parameter of the ``GPTModel`` is used exactly once. Meta parameters yield meta tensors.
    """
    unused = dict(sources)
    for mapping in weight_map:
        parts = mapping.to_hf(unused.pop(mapping.megatron).detach())
        yield from zip(mapping.hf, parts, strict=True)
    if unused:
        raise AssertionError(f"no mapping uses {_listed(unused)}")
