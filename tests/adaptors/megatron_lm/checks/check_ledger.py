"""The ledger of the whole upstream, and its undoing."""

from __future__ import annotations

import os
import sys

import torch

from megatron_npu import devices, plugin
from tests.adaptors.megatron_lm.undoing import import_all
from tests.captured_references import held
from tests.support import private, processes


def check_every_row_is_applied_or_told_why_not():
    import_all()
    rows = plugin.engine().ledger.rows
    assert len(rows) > 50
    device = devices.current().name
    for row in rows:
        assert row.state in ("applied", "skipped"), (row.target, row.state, row.reason)
        assert row.why
        if row.state == "skipped":
            assert row.reason == "upstream's own code works here" or device not in row.devices, row.target


def check_nothing_of_upstream_holds_an_original():
    """No table, default or closure has kept what is patched: a call through it would get the stock one."""
    import_all()
    assert {target: places for target, places in held(plugin.engine()).items() if places} == {}


def check_files_of_a_dataset_are_private(tmp_path):
    """Of each implementation, whoever writes them: a tool that was typed without any command of ours."""
    from megatron.data import indexed_dataset

    mask = os.umask(0o022)
    try:
        for kind in ("lazy", "mmap"):
            prefix = tmp_path / kind
            builder = indexed_dataset.make_builder(f"{prefix}.bin", impl=kind, vocab_size=100)
            builder.add_item(torch.tensor([1, 2]))
            builder.end_document()
            builder.finalize(f"{prefix}.idx")
        assert os.umask(0o022) == 0o022, "a program's own files are its own matter"
    finally:
        os.umask(mask)
    private.assert_all(tmp_path.glob("*.*"), "lazy.bin", "lazy.idx", "mmap.bin", "mmap.idx")


def check_undo():
    """In a process of its own: this one stays patched, whatever is checked after."""
    command = [sys.executable, "-m", "tests.adaptors.megatron_lm.undoing"]
    done = processes.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "undone" in done.stdout
