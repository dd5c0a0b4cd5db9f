"""What docs/internals/stock-flags.md says of the flags of upstream's parsers, against these parsers."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.conftest import ROOT, checkout
from tests.support import on_version, tiny, warm

RECORDED = ROOT / "benchmarks" / "results" / "stock-flags"
WORKER = "tests.adaptors.megatron_core.stock_flags_worker"
EVERY = 6  # of some 850 flags

@pytest.mark.parametrize("version", [on_version.MAIN, "0.19.1"])
def test_flags_are_taken_or_refused_as_the_page_says(version: str) -> None:
    """All names, and one in six flags tried again."""
    tree = checkout("megatron_core", version)
    rows: dict[str, Any] = json.loads((RECORDED / f"{tree.name}.json").read_text(encoding="utf-8"))
    done = warm.run(
        [sys.executable, "-m", WORKER, str(EVERY)],
        env=tiny.environment() | {"MEGATRON_LM_PATH": str(tree)},
        modules=warm.STOCK,
        tree=tree,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["names"] == list(rows)
    assert len(found["tried"]) > 100
    for names, row in found["tried"].items():
        assert (names, *told(row)) == (names, *told(rows[names]))

def told(row: dict[str, str]) -> tuple[str, str, str]:
    return row["given"], row["outcome"], row["line"]
