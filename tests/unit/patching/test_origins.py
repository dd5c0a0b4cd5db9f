"""Where the records of the shipped adaptors come from: a file and a module that exist."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from megatron_npu import adaptors
from megatron_npu.patching.ledger import Ledger
from megatron_npu.patching.patch import Patch
from megatron_npu.patching.registry import registry

ROOT = Path(__file__).resolve().parents[3]
ADAPTORS = ROOT / "megatron_npu" / "adaptors"
PAGES = {
    "megatron_core": "internals/patches-megatron-core.md",
    "megatron_lm": "internals/patches-megatron-lm.md",
}


@pytest.mark.parametrize("upstream", PAGES)
def test_every_adaptor_of_the_tables_is_a_file(upstream: str) -> None:
    page = (ROOT / "docs" / PAGES[upstream]).read_text(encoding="utf-8")
    cells = re.findall(r"^\| `megatron[\w.]*:[\w.]+` \|[^|]*\|[^|]*\| `([^`]*)` \|", page, re.M)
    assert len(cells) > 40
    for cell in cells:
        assert (ADAPTORS / upstream / cell).is_file() or (ADAPTORS / cell).is_file(), cell


@pytest.mark.parametrize("upstream", PAGES)
def test_every_origin_is_an_adaptor(upstream: str) -> None:
    """Of records whose function a helper made, too: they name the adaptor that asked for it."""
    adaptors.register(upstream)
    ledger = Ledger()
    ledger.keep(patch for patch in registry.patches if patch.upstream == upstream)
    for row in json.loads(ledger.json())["patches"]:
        module = adaptor(row["origin"])
        assert module.startswith((f"megatron_npu.adaptors.{upstream}", "megatron_npu.adaptors.shared")), row
        assert Path(str(sys.modules[module].__file__)).stem not in ("decorators", "__init__"), row


def adaptor(origin: str) -> str:
    """Return the module in an origin: ``module`` or ``module.function``."""
    while origin not in sys.modules:
        origin = origin.rpartition(".")[0]
    return origin


@pytest.mark.parametrize("upstream", PAGES)
def test_every_record_has_a_row_of_its_own(upstream: str) -> None:
    adaptors.register(upstream)
    patches: list[Patch] = [patch for patch in registry.patches if patch.upstream == upstream]
    ledger = Ledger()
    ledger.keep(patches)
    assert len(ledger.rows) == len(patches)
