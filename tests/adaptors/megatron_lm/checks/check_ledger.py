"""The ledger of the whole upstream, and its undoing."""

from __future__ import annotations

import sys

from megatron_npu import devices, plugin
from tests.adaptors.megatron_lm.undoing import import_all
from tests.captured_references import held
from tests.support import processes


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


def check_nothing_of_upstream_holds_an_original():
    """No table, default or closure has kept what is patched: a call through it would get the stock one."""
    import_all()
    assert {target: places for target, places in held(plugin.engine()).items() if places} == {}


def check_undo():
    """In a process of its own: this one stays patched, whatever is checked after."""
    command = [sys.executable, "-m", "tests.adaptors.megatron_lm.undoing"]
    done = processes.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "undone" in done.stdout
