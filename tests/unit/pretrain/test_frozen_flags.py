"""The flags of a run are resolved once, in one file, and not written after that."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import megatron_npu.pretrain
from megatron_npu.pretrain.flags.frozen_flags import Flags

ROOM = Path(megatron_npu.pretrain.__file__).parent


@pytest.fixture
def flags() -> Flags:
    found = Flags(lr=0.1)
    found.seed = 3
    found.freeze()
    return found


def test_nobody_writes_what_is_frozen(flags: Flags) -> None:
    with pytest.raises(FrozenInstanceError, match="cannot set seed: the flags are already resolved"):
        flags.seed = 4
    with pytest.raises(FrozenInstanceError, match="new"):
        flags.new = 4
    with pytest.raises(FrozenInstanceError, match="lr"):
        del flags.lr
    assert vars(flags) == {"lr": 0.1, "seed": 3}


def test_copies_are_frozen_too(flags: Flags) -> None:
    other = flags.changed(seed=5)
    assert (other.seed, other.lr, flags.seed) == (5, 0.1, 3)
    with pytest.raises(FrozenInstanceError):
        other.lr = 0.2
    for same in (copy.copy(flags), copy.deepcopy(flags), pickle.loads(pickle.dumps(flags))):
        assert same == flags
        with pytest.raises(FrozenInstanceError):
            same.lr = 1.0


def _written(file: Path) -> Iterator[str]:
    """Yield where a file writes an attribute of ``args``."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owner = node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            owner = node.args[0]
        else:
            continue
        if ast.unparse(owner) in ("args", "self.args", "self._args", "trainer.args", "model.args"):
            yield f"{file.name}:{node.lineno}"


def test_one_file_alone_fills_flags_in() -> None:
    found = {file: [*_written(file)] for file in ROOM.rglob("*.py")}
    writers = {file.relative_to(ROOM).as_posix() for file, places in found.items() if places}
    assert writers == {"flags/derive.py"}, found
