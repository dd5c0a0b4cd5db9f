"""The ledger of the whole host, and its undoing, which comes last."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys

import torch

from megatron_npu import devices, plugin
from megatron_npu.patching.changes import find_slot


def import_all() -> None:
    for name in plugin.engine().registry.modules():
        if name.startswith("megatron."):
            with contextlib.suppress(ModuleNotFoundError):  # a module of megatron-core's adaptors
                importlib.import_module(name)


def check_every_row_is_applied_or_told_why_not():
    import_all()
    rows = plugin.engine().ledger.rows
    assert len(rows) > 50
    device = devices.current().name
    for row in rows:
        assert row.state in ("applied", "skipped"), (row.target, row.state, row.reason)
        assert row.why
        if row.state == "skipped":
            assert row.reason == "upstream's own works here" or device not in row.devices, row.target


def check_undo():
    import_all()
    host = {patch.target: patch for patch in plugin.engine().registry.patches if patch.host == "megatron_lm"}
    plugin.uninstall()
    for patch in host.values():
        current = find_slot(sys.modules[patch.module], patch.qualname).current
        function = inspect.unwrap(getattr(current, "__func__", current))
        origin = getattr(function, "__module__", "") or ""
        assert "adaptor_" not in origin, patch.target
        assert "safe_numpy" not in getattr(current, "__name__", ""), patch.target
    assert "megatron_npu" not in torch.nn.parallel.DistributedDataParallel.__module__
    import numpy

    assert "float" not in vars(numpy)
