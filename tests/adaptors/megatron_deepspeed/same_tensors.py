"""same_tensors.py ONE OTHER: fail unless two checkpoints have the same tensors, bit for bit.

The state of the host's generator is left out: a resumed run has built its loaders once more, and nothing
draws from it afterwards.
"""

import sys
from pathlib import Path

import torch


def different(one: object, other: object, name: str) -> list[str]:
    """Return the names of tensors that differ."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) or name.endswith("torch_rng_state") else [name]
    pairs = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, (list, tuple)) else ()
    return [found for key, value in pairs for found in different(value, other[key], f"{name}.{key}")]


first, second = map(Path, sys.argv[1:])
files = sorted(first.glob("*.pt"))
assert files
for file in files:  # a test has written them
    contents = [torch.load(folder / file.name, weights_only=False) for folder in (first, second)]
    names = different(*contents, file.name)
    assert not names, names
