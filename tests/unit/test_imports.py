"""The house rule: imports point downward only. Read from the sources, nothing is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_npu"

# room -> what its files may import, by first two dotted parts or by top-level name
FORBIDDEN = {
    "patching": [
        "megatron",
        "torch",
        "torch_npu",
        "megatron_npu.hosts",
        "megatron_npu.ops",
        "megatron_npu.devices",
    ],
    "devices": ["megatron", "megatron_npu.ops", "megatron_npu.hosts", "megatron_npu.patching"],
    "ops": ["megatron", "megatron_npu.hosts", "megatron_npu.patching", "megatron_npu.plugin"],
    "standins": ["megatron", "megatron_npu.hosts"],
    "hosts": ["torch_npu", "megatron_npu.training"],
    "preprocessing": ["megatron", "torch", "megatron_npu.training"],
    "settings.py": ["torch", "megatron", "megatron_npu.devices", "megatron_npu.ops", "megatron_npu.hosts"],
}


def imports(file: Path) -> set[str]:
    """Return the full names that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", FORBIDDEN)
def test_imports_point_downward(room):
    place = PACKAGE / room
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            for forbidden in FORBIDDEN[room]:
                assert not f"{name}.".startswith(f"{forbidden}."), f"{file} imports {name}"


def test_the_plug_in_imports_neither_torch_nor_megatron():
    code = "import sys, megatron_npu; print(sorted({'torch', 'megatron'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_environment_variables_are_read_in_one_place():
    for file in PACKAGE.rglob("*.py"):
        if file.name != "settings.py" and "sim" not in file.parts:
            source = file.read_text(encoding="utf-8")
            for call in ("environ.get", "getenv"):
                assert f'{call}("MEGATRON_NPU' not in source, file
