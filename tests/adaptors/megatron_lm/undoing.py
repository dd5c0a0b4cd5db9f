"""Patches all of Megatron-LM, undoes it, and fails unless every symbol is stock again: ``python -m`` this."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from pathlib import Path

import torch

import megatron_npu
from megatron_npu import plugin
from megatron_npu.patching.attribute_patch import find_slot


def import_all() -> None:
    """Import every module of upstream that has a patch, those of ``tasks/`` as its scripts find them."""
    megatron = importlib.import_module("megatron")  # now the patches are on record
    sys.path.append(str(Path(megatron.__path__[0]).parent / "tasks"))
    for name in plugin.engine().registry.modules():
        with contextlib.suppress(ModuleNotFoundError):  # a module of megatron-core's adaptors
            importlib.import_module(name)


def must_be_stock() -> int:
    """Return how many symbols were looked at; raise AssertionError where one is still ours."""
    patches = [patch for patch in plugin.engine().registry.patches if patch.upstream == "megatron_lm"]
    for patch in patches:
        current = find_slot(sys.modules[patch.module], patch.qualname).current
        function = inspect.unwrap(getattr(current, "__func__", current))
        origin = getattr(function, "__module__", "") or ""
        assert "megatron_npu.adaptors" not in origin, patch.target
        assert "safe_numpy" not in getattr(current, "__name__", ""), patch.target
    assert "megatron_npu" not in torch.nn.parallel.DistributedDataParallel.__module__
    import numpy

    assert "float" not in vars(numpy)
    return len(patches)


def main() -> None:
    """Patch, undo, look."""
    megatron_npu.install()
    import_all()
    assert plugin.engine().ledger.count("applied") > 40
    plugin.uninstall()
    looked_at = must_be_stock()
    assert looked_at > 50
    print(f"{looked_at} symbols undone")


if __name__ == "__main__":
    main()
