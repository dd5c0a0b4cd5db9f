"""Check downloaded weights against their published hashes, and search them for implausible values.

A ``model.safetensors`` contains no checksum, but the hub has the SHA-256 of each large file: its cache uses
the SHA-256 as the file name, and ``hf download --local-dir`` stores it beside the file.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megatron_npu.base import errors, files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums

_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK = 1 << 20
MOST = 1e5  # the weights of trained models stay far below; a flipped bit of an exponent spikes over it
_PATTERNS = ("*.safetensors", "*.bin")


def require_as_downloaded(folder: Path) -> int:
    """Compare the weights in a folder with the checksums of the hub, if these are available.

    Return the number of files that were compared.

    Raises:
        UsageError: a file differs from the published one.
    """
    known = 0
    for file in sorted(path for pattern in _PATTERNS for path in folder.glob(pattern)):
        digest = _of_the_hub(file)
        if digest is None:
            continue
        known += 1
        if _sha256(file) != digest:
            raise UsageError(
                f"{file} is damaged: its SHA-256 differs from the hub's ({digest[:16]}…)",
                remedy="Remove it and download it again.",
            )
    return known


def _of_the_hub(file: Path) -> str | None:
    """Return the digest that was recorded when a file was downloaded to the hub's cache or to a folder."""
    if file.is_symlink() and _SHA256.fullmatch(file.resolve().name):
        return file.resolve().name
    note = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    try:
        lines = files.text(note).split()
    except (OSError, ValueError):
        return None
    return lines[1] if len(lines) > 1 and _SHA256.fullmatch(lines[1]) else None


def _sha256(file: Path) -> str:
    digest, block = hashlib.sha256(), bytearray(_BLOCK)
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


def tell_of_implausible(where: object, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Log the names of weights whose values do not occur in trained models, and return these names.

    Args:
        where: the source of the weights.
        weights: names and values, on any device.
    """
    found = {name: largest for name, tensor in weights if (largest := _largest(tensor)) > MOST}
    if found:
        name, largest = next(iter(found.items()))
        more = f", and {len(found) - 1} more weights have such values" if len(found) > 1 else ""
        print(
            f"megatron_npu: warning: {where}: {errors.printable(name)} has a value of {largest:.3g}{more}, "
            f"but the weights of trained models stay below {MOST:g}. The file may be damaged.",
            file=sys.stderr,
            flush=True,
        )
    return [*found]


def tell_of_loaded(folder: Path, models: Iterable[torch.nn.Module]) -> list[str]:
    """Search models loaded without checksums for implausible weights, and return the names of these weights.

    Checkpoints with checksums have already been verified.
    """
    if (folder / checksums.NAME).is_file():
        return []
    return tell_of_implausible(folder, (named for model in models for named in model.named_parameters()))


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value in a tensor, or infinity if the tensor contains NaN."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return 0.0
    least, most = torch.aminmax(tensor.detach())
    largest = max(-float(least), float(most))
    return math.inf if math.isnan(float(least) + float(most)) else largest
