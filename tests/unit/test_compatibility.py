"""The page of compatibility is made from what ``check`` finds."""

from __future__ import annotations

import shutil
import sys

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.upstream import megatrons
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import compatibility


def test_a_changed_function_is_listed(tmp_path, monkeypatch):
    try:
        root = megatrons.find().root
    except UsageError:
        pytest.skip("no Megatron is installed")
    shutil.copytree(root / "megatron" / "core", tmp_path / "megatron" / "core")
    path = tmp_path / "megatron/core/tensor_parallel/random.py"
    text = path.read_text()
    assert "def _set_cuda_rng_state(" in text
    path.write_text(text.replace("def _set_cuda_rng_state(", "def _set_cuda_rng_state(more, "))
    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(sys, "argv", ["compatibility.py", str(tmp_path)])
    compatibility.main()
    page = (tmp_path / "page.md").read_text()
    version = megatrons.find(tmp_path).version
    assert f"\n## {version}\n" in page
    assert "random:_set_cuda_rng_state` | replace | fails | signature changed" in page
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {version} | yes |")]
    assert row.endswith("| 1 |")
