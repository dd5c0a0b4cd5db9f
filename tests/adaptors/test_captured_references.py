"""No table, default or closure of a supported upstream holds what is patched (Megatron-LM's: ``checks/``)."""

from __future__ import annotations

import os
import sys

import pytest

from tests.conftest import ROOT
from tests.support import tiny, warm

CORE = ["megatron_core-0.12.1", "megatron_core-0.19.2"]
DEEPSPEED = ["8387ae17", "4efb479d"]
if os.environ.get("TEST_EVERY_VERSION") == "1":
    CORE += [f"megatron_core-{version}" for version in ("0.13.1", "0.14.0", "0.15.3", "0.17.1", "0.18.2")]


@pytest.mark.parametrize("tree", [*CORE, "core_v0.16.1", *DEEPSPEED])
def test_nothing_of_upstream_holds_an_original(tree: str) -> None:
    root = ROOT / "checkouts" / tree
    if not root.is_dir():
        pytest.skip(f"no checkouts/{tree}: run scripts/get_megatron.sh")
    if tree in DEEPSPEED:
        pytest.importorskip("deepspeed")
    path = os.pathsep.join([str(root), tiny.environment()["PYTHONPATH"]])
    done = warm.run(
        [sys.executable, "-m", "tests.captured_references"],
        env=tiny.environment() | {"MEGATRON_LM_PATH": str(root), "PYTHONPATH": path},
        modules=warm.DRIVER if tree in CORE else (),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith(" targets, none of them held\n")
